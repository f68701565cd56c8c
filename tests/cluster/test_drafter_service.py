"""A real drafter, as a process over loopback and inside this one: what a verifier may rely on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import InvalidRequestError, UnavailableError, UnsupportedError
from kadence.internal import common_pb2, drafter_pb2_grpc
from kadence.internal import drafter_pb2 as pb
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.runtime import config as runtime_config
from services.runtime.channels import connect
from tests.contract.fake_scheduler import FakeScheduler, serving
from tests.support.scheduling import until

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"drafter.max_sessions": 3, "drafter.heartbeat_seconds": 0.2, "drafter.max_draft_tokens": 8}


@dataclass
class Drafter:
    """A running drafter, however it runs."""

    address: str
    metrics_address: str
    stop: Callable[[], Any]

    async def metric(self, name: str) -> float:
        page = await asyncio.to_thread(self._page)
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name + "{"))

    def _page(self) -> str:
        return urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5).read().decode()


@asynccontextmanager
async def running(transport: str, **settings: Any) -> AsyncIterator[Drafter]:
    overrides = {**SETTINGS, **{f"drafter.{key}": value for key, value in settings.items()}}
    if transport == "inproc":
        service = DrafterService(
            runtime_config.load(DrafterConfig, None, "drafter", overrides), inproc_name="drafter-test"
        )
        await service.start()
        yield Drafter(service.address, service.metrics_address, lambda: service.drain(0))
        await service.drain(0)
        return
    arguments = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.drafter", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        word, name, address, metrics = (await process.stdout.readline()).decode().split()
        assert (word, name) == ("READY", "drafter")

        async def stop() -> None:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 20) == 0

        yield Drafter(address, metrics.removeprefix("metrics="), stop)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture(params=["grpc", "inproc"])
async def drafter(request: pytest.FixtureRequest) -> AsyncIterator[Drafter]:
    async with running(request.param) as it:
        yield it


class Stream:
    """A verifier's end of a Draft stream; beats unless told not to."""

    def __init__(self, stub: Any, beating: bool = True) -> None:
        self._outgoing: asyncio.Queue[pb.DraftRequest] = asyncio.Queue()
        self._beating = beating
        self._step = 0
        self.beats = 0
        self.call = stub.Draft(self._requests())

    def send(self, **fields: Any) -> int:
        self._step += 1
        self._outgoing.put_nowait(pb.DraftRequest(step=self._step, **fields))
        return self._step

    async def receive(self) -> pb.DraftResponse:
        async with asyncio.timeout(10):
            while True:
                response: pb.DraftResponse = await anext(self.call)
                if not response.HasField("heartbeat"):
                    return response
                self.beats += 1

    async def ask(self, **fields: Any) -> pb.DraftResponse:
        step = self.send(**fields)
        response = await self.receive()
        assert response.step == step
        return response

    async def _requests(self) -> AsyncIterator[pb.DraftRequest]:
        while True:
            try:
                async with asyncio.timeout(0.1):
                    message = await self._outgoing.get()
            except TimeoutError:
                if not self._beating:
                    continue
                message = pb.DraftRequest(heartbeat=common_pb2.Heartbeat(sequence=1))
            yield message


@asynccontextmanager
async def streaming(drafter: Drafter, **options: Any) -> AsyncIterator[Stream]:
    async with connect(drafter_pb2_grpc.DrafterServiceStub, drafter.address) as stub:
        stream = Stream(stub, **options)
        yield stream
        stream.call.cancel()


def stamp(name: str, base: int = 0, attempt: int = 0) -> common_pb2.Stamp:
    return common_pb2.Stamp(request_id=name, attempt=attempt, round=7, base_length=base)


def start(name: str, tokens: list[int], attempt: int = 0) -> dict[str, list[Any]]:
    return {
        "opens": [pb.SessionOpen(stamp=stamp(name, attempt=attempt))],
        "commits": [pb.SessionCommit(stamp=stamp(name, attempt=attempt), token_ids=tokens)],
    }


def wish(name: str, base: int, count: int = 3, attempt: int = 0) -> list[pb.Propose]:
    return [pb.Propose(stamp=stamp(name, base, attempt), max_tokens=count)]


def drafts(response: pb.DraftResponse) -> dict[str, list[int]]:
    return {draft.stamp.request_id: list(draft.token_ids) for draft in response.drafts}


def resyncs(response: pb.DraftResponse) -> dict[str, int]:
    return {resync.stamp.request_id: resync.have for resync in response.resyncs}


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_describe(drafter: Drafter) -> None:
    async with connect(drafter_pb2_grpc.DrafterServiceStub, drafter.address) as stub:
        caller = common_pb2.Description(kind="verifier", drafter_kind="ngram")
        it = (await stub.DescribeDrafter(pb.DescribeDrafterRequest(caller=caller), timeout=5)).drafter
        assert (it.kind, it.drafter_kind, it.max_sessions, it.max_draft_tokens) == ("drafter", "ngram", 3, 8)
        assert it.replica_id and it.version and it.max_message_bytes >= 16 << 20
        caller.drafter_kind = "dflash2"
        with pytest.raises(InvalidRequestError, match="is dflash2; this drafter is ngram"):
            await stub.DescribeDrafter(pb.DescribeDrafterRequest(caller=caller), timeout=5)
        with pytest.raises(UnsupportedError, match="no projection"):
            await anext(stub.FetchProjection(pb.FetchProjectionRequest(), timeout=5))


async def test_a_batch_lives_and_dies(drafter: Drafter) -> None:
    async with streaming(drafter) as stream:
        a, b = start("a", [1, 2, 3, 4, 1, 2]), start("b", [9, 9, 9])
        both = {key: a[key] + b[key] for key in a}
        response = await stream.ask(**both, proposes=wish("a", 6) + wish("b", 3, 5))
        assert drafts(response) == {"a": [3, 4, 1], "b": [9] * 5} and not response.resyncs
        assert response.drafts[0].stamp.round == 7 and response.compute_seconds > 0
        # Commits without proposes get no answer, the next answer belongs to the next step.
        stream.send(commits=[pb.SessionCommit(stamp=stamp("a", 6), token_ids=[5, 1])])
        response = await stream.ask(
            commits=[pb.SessionCommit(stamp=stamp("a", 8), token_ids=[2])],
            closes=[pb.SessionClose(stamp=stamp("b"))],
            proposes=wish("a", 9, 100) + wish("b", 3),
        )
        # 5 1 2 is new, 1 2 was last followed by 5; eight tokens are the drafter's limit.
        assert drafts(response) == {"a": [5, 1, 2, 5, 1, 2, 5, 1]} and resyncs(response) == {"b": 0}
        assert await drafter.metric("kadence_drafter_sessions") == 1
        assert await drafter.metric("kadence_drafter_steps_total") == 2
        assert await drafter.metric("kadence_drafter_proposed_tokens_total") == 3 + 5 + 8
        assert await drafter.metric("kadence_drafter_resyncs_total") == 1
        assert await drafter.metric("kadence_drafter_compute_seconds_count") == 2


async def test_nothing_known_is_an_empty_draft(drafter: Drafter) -> None:
    async with streaming(drafter) as stream:
        assert drafts(await stream.ask(**start("a", [1, 2, 3]), proposes=wish("a", 3))) == {"a": []}


async def test_gap_is_resynced_and_refilled(drafter: Drafter) -> None:
    async with streaming(drafter) as stream:
        tokens = [1, 2, 3, 1, 2, 4, 1, 2]
        await stream.ask(**start("a", tokens[:3]), proposes=wish("a", 3))
        lost = [pb.SessionCommit(stamp=stamp("a", 6), token_ids=tokens[6:])]
        response = await stream.ask(commits=lost, proposes=wish("a", 8))
        assert resyncs(response) == {"a": 3} and not response.drafts
        rest = [pb.SessionCommit(stamp=stamp("a", 3), token_ids=tokens[3:])]
        assert drafts(await stream.ask(commits=rest, proposes=wish("a", 8, 2))) == {"a": [4, 1]}


async def test_long_prompts_are_indexed_off_the_loop_in_order(drafter: Drafter) -> None:
    async with streaming(drafter) as stream:
        prompt = list(range(20_000))
        stream.send(**start("a", prompt))
        response = await stream.ask(
            commits=[pb.SessionCommit(stamp=stamp("a", 20_000), token_ids=[500, 501])], proposes=wish("a", 20_002)
        )
        assert drafts(response) == {"a": [502, 503, 504]}


async def test_attempts(drafter: Drafter) -> None:
    async with streaming(drafter) as stream:
        await stream.ask(**start("a", [1, 2, 3], attempt=1), proposes=wish("a", 3, attempt=1))
        stale = await stream.ask(**start("a", [7, 7, 7], attempt=0), proposes=wish("a", 3, attempt=0))
        assert not stale.drafts and not stale.resyncs
        assert await drafter.metric("kadence_drafter_stale_messages_total") == 3
        newer = await stream.ask(**start("a", [7, 7, 7], attempt=2), proposes=wish("a", 3, attempt=2))
        assert drafts(newer) == {"a": [7, 7, 7]} and newer.drafts[0].stamp.attempt == 2
        again = await stream.ask(**start("a", [8, 8, 8], attempt=2), proposes=wish("a", 3, attempt=2))
        assert drafts(again) == {"a": [8, 8, 8]}
        assert await drafter.metric("kadence_drafter_sessions") == 1


async def test_capacity(drafter: Drafter) -> None:
    async with streaming(drafter) as first, streaming(drafter) as second:
        for name in "abc":
            await first.ask(**start(name, [5, 5, 5]), proposes=wish(name, 3))
        full = await second.ask(**start("d", [5, 5, 5]), proposes=wish("d", 3))
        assert resyncs(full) == {"d": 0} and not full.drafts
        await first.ask(closes=[pb.SessionClose(stamp=stamp("a"))], proposes=wish("b", 3))
        assert drafts(await second.ask(**start("d", [5, 5, 5]), proposes=wish("d", 3, 1))) == {"d": [5]}
        # The same request id on another stream is another session.
        assert resyncs(await second.ask(proposes=wish("b", 3))) == {"b": 0}


async def test_stream_end_frees_its_sessions(drafter: Drafter) -> None:
    async def sessions() -> float:
        return await drafter.metric("kadence_drafter_sessions")

    async with streaming(drafter) as kept:
        await kept.ask(**start("k", [5, 5, 5]), proposes=wish("k", 3))
        async with streaming(drafter) as stream:
            for name in "ab":
                await stream.ask(**start(name, [5, 5, 5]), proposes=wish(name, 3))
            assert await sessions() == 3

        async def freed() -> bool:
            return await sessions() == 1

        await eventually(freed)
        assert drafts(await kept.ask(proposes=wish("k", 3, 1))) == {"k": [5]}


BAD_ROWS = common_pb2.Tensor(dtype=common_pb2.DTYPE_FLOAT32, shape=[1, 4], data=bytes(15))
MALFORMED = {
    "negative token": ({"token_ids": [3, -1]}, r"commits\[0\].token_ids\[1\]: is -1"),
    "rows of wrong size": ({"feature_rows": BAD_ROWS}, "has 15 bytes; shape and dtype need 16"),
    "rows nobody asked for": (
        {"feature_rows": common_pb2.Tensor(dtype=common_pb2.DTYPE_FLOAT32, shape=[1, 4], data=bytes(16))},
        "takes no rows",
    ),
}


@pytest.mark.parametrize("what", sorted(MALFORMED))
async def test_malformed_messages_end_their_stream_only(drafter: Drafter, what: str) -> None:
    fields, says = MALFORMED[what]
    async with streaming(drafter) as good, streaming(drafter) as bad:
        for stream, name in ((good, "g"), (bad, "b")):
            await stream.ask(**start(name, [5, 5, 5]), proposes=wish(name, 3))
        bad.send(commits=[pb.SessionCommit(stamp=stamp("b", 3), **fields)])
        with pytest.raises(InvalidRequestError, match=says) as caught:
            await bad.receive()
        assert caught.value.violations[0].field.startswith("commits[0]")
        assert drafts(await good.ask(proposes=wish("g", 3, 1))) == {"g": [5]}
        assert await drafter.metric("kadence_drafter_sessions") == 1


async def test_heartbeats_keep_an_idle_stream_and_silence_ends_it(drafter: Drafter) -> None:
    async with streaming(drafter) as beating, streaming(drafter, beating=False) as silent:
        await silent.ask(**start("s", [5, 5, 5]), proposes=wish("s", 3))
        with pytest.raises(UnavailableError, match=r"the verifier sent nothing for 0\.5 s"):
            await silent.receive()
        assert silent.beats >= 2
        await beating.ask(**start("b", [5, 5, 5]), proposes=wish("b", 3))
        assert beating.beats >= 2
        assert await drafter.metric("kadence_drafter_sessions") == 1


async def test_stops_while_sessions_are_open() -> None:
    for transport in ("grpc", "inproc"):
        async with running(transport, drain_seconds=0.2) as drafter, streaming(drafter) as stream:
            await stream.ask(**start("a", [5, 5, 5]), proposes=wish("a", 3))
            await asyncio.gather(drafter.stop(), _lost(stream))


async def test_kind_none() -> None:
    async with running("inproc", kind="none") as drafter, streaming(drafter) as stream:
        assert drafts(await stream.ask(**start("a", [5, 5, 5]), proposes=wish("a", 3))) == {"a": []}


async def test_attaches_reports_and_drains() -> None:
    scheduler = FakeScheduler()
    async with (
        serving("grpc", scheduler) as address,
        running("grpc", scheduler=address, drain_seconds=5) as drafter,
        streaming(drafter) as stream,
    ):
        await until(lambda: bool(scheduler.of("register")))
        registered = scheduler.of("register")[0]
        assert (registered.address, registered.metrics_address) == (drafter.address, drafter.metrics_address)
        assert registered.description.drafter_kind == "ngram" and registered.pid not in (0, os.getpid())
        await stream.ask(**start("a", [5, 5, 5]), proposes=wish("a", 3))
        await until(lambda: bool(scheduler.of("load")) and scheduler.of("load")[-1].running == 1)
        stopping = asyncio.create_task(drafter.stop())
        await until(lambda: bool(scheduler.of("draining")))
        # Draining serves the sessions it has, and is over with the last of them.
        assert drafts(await stream.ask(proposes=wish("a", 3, 1))) == {"a": [5]}
        assert not stopping.done()
        stream.send(closes=[pb.SessionClose(stamp=stamp("a"))])
        await asyncio.gather(stopping, _lost(stream))


async def test_health() -> None:
    service = DrafterService(DrafterConfig(metrics_port=-1), inproc_name="drafter-health")
    assert not await service.health()
    await service.start()
    assert await service.health() and service.metrics_address == ""
    await service.drain(0)


async def _lost(stream: Stream) -> None:
    with pytest.raises(UnavailableError):
        await stream.receive()
