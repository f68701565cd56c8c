"""A replica stays attached: registers, reports, hears policy, notices a dead scheduler and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kadence.errors import UnavailableError
from kadence.internal import control_pb2
from services.runtime.attach import Attachment
from services.runtime.heartbeat import alive
from tests.contract.fake_scheduler import Answer, FakeScheduler, serving
from tests.support.scheduling import until


@asynccontextmanager
async def attached(address: str, **callbacks: Any) -> AsyncIterator[Attachment]:
    def register() -> control_pb2.Register:
        return control_pb2.Register(address="replica")

    attachment = Attachment(address, register, **callbacks)
    await attachment.start()
    try:
        yield attachment
    finally:
        await attachment.close()
        await attachment.close()


@pytest.fixture(params=["grpc", "inproc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_reports_and_orders(transport: str) -> None:
    scheduler, policies, drafters = FakeScheduler(), [], []  # type: ignore[var-annotated]
    async with (
        serving(transport, scheduler) as address,
        attached(address, on_policy=policies.append, on_drafters=drafters.append) as attachment,
    ):
        await asyncio.wait_for(attachment.attached.wait(), 5)
        assert scheduler.of("register")[0].address == "replica"
        for running in range(1, 201):
            attachment.report_load(control_pb2.Load(running=running))
            await asyncio.sleep(0.001)
        await until(lambda: scheduler.of("load")[-1].running == 200)
        assert 2 <= len(scheduler.of("load")) <= 12  # 0.2 s or a little more of reports, ten a second
        attachment.report_outcomes(control_pb2.OutcomeBatch(outcomes=[control_pb2.Outcome(drafted=3)]))
        attachment.drain()
        await until(lambda: bool(scheduler.of("outcomes") and scheduler.of("draining")))
        await until(lambda: len(scheduler.of("heartbeat")) >= 3)
        assert [beat.sequence for beat in scheduler.of("heartbeat")][:3] == [1, 2, 3]
        scheduler.say.put_nowait(Answer(policy=control_pb2.Policy(name="fixed:3")))
        scheduler.say.put_nowait(Answer(drafters=control_pb2.Peers(peers=[control_pb2.Peer(replica_id="d")])))
        await until(lambda: bool(policies and drafters))
        assert (policies[0].name, drafters[0].peers[0].replica_id) == ("fixed:3", "d")


@pytest.mark.parametrize("how", ["ended", "mute", "error"])
async def test_reattaches(transport: str, how: str) -> None:
    scheduler, lost = FakeScheduler(), []  # type: ignore[var-annotated]
    async with (
        serving(transport, scheduler) as address,
        attached(address, on_lost=lambda: lost.append(1)) as attachment,
    ):
        attachment.report_load(control_pb2.Load(running=7))
        attachment.drain()
        await until(lambda: bool(scheduler.of("draining") and scheduler.of("load")))
        scheduler.heard.clear()
        if how == "mute":
            scheduler.mute = True
        else:
            scheduler.say.put_nowait(None if how == "ended" else "not a message")  # type: ignore[arg-type]
        await until(lambda: bool(lost and scheduler.of("register")))
        scheduler.mute = False
        # The newest load and the wish to drain are said again, nobody else remembers them.
        await until(lambda: bool(scheduler.of("draining") and scheduler.of("load")))
        assert scheduler.of("load")[-1].running == 7


async def test_scheduler_comes_late_and_returns(transport: str) -> None:
    scheduler = FakeScheduler()
    async with serving("grpc", FakeScheduler()) as free:
        port = int(free.rsplit(":", 1)[1])
    address = f"127.0.0.1:{port}" if transport == "grpc" else "inproc://attach"
    async with attached(address) as attachment:
        for _ in range(2):
            await asyncio.sleep(0.3)
            assert not attachment.attached.is_set()
            async with serving(transport, scheduler, port):
                await asyncio.wait_for(attachment.attached.wait(), 10)
            await until(lambda: not attachment.attached.is_set())
    assert len(scheduler.of("register")) == 2


async def test_outcomes_are_bounded() -> None:
    attachment = Attachment("127.0.0.1:9", control_pb2.Register, max_outcome_batches=2)
    for drafted in range(5):
        attachment.report_outcomes(control_pb2.OutcomeBatch(outcomes=[control_pb2.Outcome(drafted=drafted)] * 3))
    assert attachment.dropped_outcomes == 9
    await attachment.close()


async def test_silence_is_death() -> None:
    async def messages() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0.1)
        yield 2
        await asyncio.sleep(30)

    got = []
    with pytest.raises(UnavailableError, match="the peer sent nothing"):
        async for message in alive(messages(), lambda: 0.08, "the peer"):
            got.append(message)
    assert got == [1, 2]
