"""Replicas come, go, hang and disagree; requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import InternalError, InvalidRequestError, OverloadedError, UnavailableError
from kadence.internal import common_pb2, control_pb2, control_pb2_grpc
from services.runtime.attach import Attachment
from services.runtime.channels import connect
from services.scheduler.dispatch import MAX_MOVES
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, ask, scheduler, until

PROMPT = [5, 6, 7]


@pytest.fixture(params=["grpc", "inproc"])
async def cluster(request: pytest.FixtureRequest, tokenizer_folder: Path) -> AsyncIterator[Cluster]:
    async with scheduler(tokenizer_folder, request.param) as cluster:
        yield cluster


def fake(cluster: Cluster, name: str = "a", **options: Any) -> FakeVerifier:
    """A verifier that is reached as the scheduler is."""
    inproc = f"verifier-{name}" if cluster.inner.startswith("inproc") else ""
    return FakeVerifier(cluster.inner, replica_id=f"verifier-{name}", inproc_name=inproc, **options)


async def ready(*verifiers: FakeVerifier) -> None:
    for verifier in verifiers:
        await until(lambda verifier=verifier: verifier.streams)


@asynccontextmanager
async def drafter(cluster: Cluster, name: str = "d1", kind: str = "ngram", vocab: int = 0) -> AsyncIterator[Attachment]:
    description = common_pb2.Description(kind="drafter", replica_id=name, drafter_kind=kind, vocab_size=vocab)
    attachment = Attachment(
        cluster.inner, lambda: control_pb2.Register(description=description, address=f"127.0.0.1:{len(name)}")
    )
    await attachment.start()
    try:
        yield attachment
    finally:
        await attachment.close()


async def test_requests_spread_by_outstanding_tokens(cluster: Cluster) -> None:
    async with fake(cluster, "a") as a, fake(cluster, "b") as b:
        await ready(a, b)
        a.gate.clear(), b.gate.clear()
        tasks = [asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=200)))]
        await until(lambda: len(a.submits) + len(b.submits) == 1)
        loaded, free = (a, b) if a.submits else (b, a)
        tasks += [asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=20))) for _ in range(4)]
        await until(lambda: len(a.submits) + len(b.submits) == 5)
        assert len(loaded.submits) == 1 and len(free.submits) == 4
        a.gate.set(), b.gate.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("stop", [[], ["no such text"]])
async def test_a_killed_verifiers_requests_go_on_elsewhere(cluster: Cluster, stop: list[str]) -> None:
    async with fake(cluster, "b", step_seconds=0.0) as b:
        await ready(b)
        plain = await cluster.generate(ask(ids=PROMPT, max_tokens=60, ignore_eos=True, stop=stop))
        async with fake(cluster, "a", step_seconds=0.02) as a:
            await ready(a)
            b.gate.clear()
            b.max_sessions = 8
            requests = [ask(ids=PROMPT, max_tokens=60, ignore_eos=True, stop=stop) for _ in range(4)]
            tasks = [asyncio.create_task(cluster.generate(request)) for request in requests]
            await until(lambda: a.running and all(entry.done > 6 for entry in a.running.values()))
            moved = {key[0]: entry for key, entry in a.running.items()}
            await a.kill()
            b.gate.set()
            for result in await asyncio.gather(*tasks):
                assert result.token_ids == plain.token_ids and result.text == plain.text
                assert result.started is not None and result.started.attempt == 0
        replayed = [submit for submit in b.submits if submit.stamp.attempt == 1]
        assert {submit.stamp.request_id for submit in replayed} == set(moved) and moved
        assert all(submit.committed_token_ids for submit in replayed)
        await until(lambda: cluster.states)
        assert (await cluster.states())["verifier-b"] == "ready"


async def test_the_only_verifier_dies(cluster: Cluster) -> None:
    async with fake(cluster) as a:
        await ready(a)
        a.gate.clear()
        task = asyncio.create_task(cluster.generate(ask(ids=PROMPT)))
        await until(lambda: a.running)
        await a.kill()
        with pytest.raises(UnavailableError, match="verifier verifier-a was lost"):
            await task
        await until(lambda: cluster.metric("kadence_replicas", kind="verifier", state="lost") == 1, seconds=0.5)
        assert (await cluster.states()) == {"verifier-a": "lost"}


async def test_a_broken_stream_is_dialled_again_and_orphans_are_stopped(cluster: Cluster) -> None:
    async with fake(cluster, step_seconds=0.01) as a:
        await ready(a)
        task = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=60, ignore_eos=True)))
        await until(lambda: a.running and next(iter(a.running.values())).done > 3)
        held = dict(a.running)
        a.hang_up()
        result = await task
        assert len(result.token_ids) == 60
        assert a.streams == 2 and [(s.request_id, s.attempt) for s in a.stops] == list(held)
        assert a.submits[1].stamp.attempt == 1 and a.submits[1].committed_token_ids


async def test_a_request_that_kills_verifiers_is_not_passed_on_for_ever(cluster: Cluster) -> None:
    async with fake(cluster, refuse=("UNAVAILABLE", "on fire")) as a:
        await ready(a)
        with pytest.raises(UnavailableError, match="on fire"):
            await cluster.generate(ask(ids=PROMPT))
        assert [submit.stamp.attempt for submit in a.submits] == list(range(MAX_MOVES + 1))


@pytest.mark.parametrize(
    ("code", "kind"),
    [("RESOURCE_EXHAUSTED", OverloadedError), ("INTERNAL", InternalError), ("NONSENSE", InternalError)],
)
async def test_failures_keep_their_code(cluster: Cluster, code: str, kind: type[Exception]) -> None:
    async with fake(cluster, refuse=(code, "out of pages")) as a:
        await ready(a)
        with pytest.raises(kind, match="out of pages"):
            await cluster.generate(ask(ids=PROMPT))
        assert len(a.submits) == 1
        await until(lambda: cluster.service._dispatcher.in_flight == 0)


async def test_a_gap_in_the_tokens_is_an_error(cluster: Cluster) -> None:
    async with fake(cluster, step_seconds=0.01) as a:
        await ready(a)
        task = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=60, ignore_eos=True)))
        await until(lambda: a.running and next(iter(a.running.values())).done > 3)
        next(iter(a.running.values())).done += 1
        with pytest.raises(InternalError, match="verifier sent tokens from"):
            await task
        await until(lambda: a.stops)


@pytest.fixture(params=["grpc", "inproc"])
async def quick(request: pytest.FixtureRequest, tokenizer_folder: Path) -> AsyncIterator[Cluster]:
    """Five heartbeats a second."""
    async with scheduler(tokenizer_folder, request.param, heartbeat_seconds=0.2) as cluster:
        yield cluster


async def test_two_missed_heartbeats_are_a_loss(quick: Cluster) -> None:
    description = common_pb2.Description(kind="drafter", replica_id="silent", drafter_kind="ngram")
    register = control_pb2.Register(description=description, address="127.0.0.1:9")

    async def requests() -> AsyncIterator[control_pb2.AttachRequest]:
        yield control_pb2.AttachRequest(register=register)
        await asyncio.sleep(30)

    async with connect(control_pb2_grpc.ControlServiceStub, quick.inner) as stub:
        call = stub.Attach(requests())
        assert (await anext(call)).registered.heartbeat_seconds == 0.2
        assert (await quick.states()) == {"silent": "ready"}
        with pytest.raises(UnavailableError, match=r"drafter silent sent nothing for 0\.5 s"):
            async for _ in call:
                pass
        assert (await quick.states()) == {"silent": "lost"}


async def test_the_scheduler_beats(quick: Cluster) -> None:
    async with fake(quick) as a:
        await ready(a)
        await asyncio.sleep(1.5)  # seven intervals, after two missed ones the attachment would start anew
        assert a.streams == 1 and len(a.policies) == 1


async def test_drafters_are_announced_to_verifiers(cluster: Cluster) -> None:
    async with fake(cluster) as a:
        await until(lambda: a.drafters == [[]])
        async with drafter(cluster) as one:
            await until(lambda: a.drafters[-1] == ["d1"])
            async with drafter(cluster, "dr2"):
                await until(lambda: a.drafters[-1] == ["d1", "dr2"])
                async with fake(cluster, "b") as b:
                    await until(lambda: b.drafters == [["d1", "dr2"]])
                one.drain()
                await until(lambda: a.drafters[-1] == ["dr2"])
            await until(lambda: a.drafters[-1] == [])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", "other", ["description.model", "'other'", "'tiny'"]),
        ("vocab_size", 7, ["description.vocab_size", "7", str(tiny_model.VOCAB_SIZE)]),
    ],
)
async def test_a_verifier_of_another_model_is_refused(
    cluster: Cluster, field: str, value: Any, words: list[str]
) -> None:
    verifier = fake(cluster, **{field: value})
    register = control_pb2.Register(description=verifier.description(), address="127.0.0.1:9")
    error = await refusal(cluster, register)
    assert all(word in error.message for word in words), error
    assert error.violations[0].field == words[0] and not await cluster.states()


async def test_drafters_that_do_not_fit_are_refused(cluster: Cluster) -> None:
    def register(**fields: Any) -> control_pb2.Register:
        description = common_pb2.Description(kind="drafter", replica_id="d9", **fields)
        return control_pb2.Register(description=description, address="127.0.0.1:9")

    async with drafter(cluster):
        await until(cluster.states)
        error = await refusal(cluster, register(drafter_kind="mtp"))
        assert "'mtp'; drafter d1 is of kind 'ngram'" in error.message
        error = await refusal(cluster, register(drafter_kind="ngram", vocab_size=9))
        assert "description.vocab_size: 9; the served model has 330" in error.message
        assert list(await cluster.states()) == ["d1"]


async def refusal(cluster: Cluster, register: control_pb2.Register) -> InvalidRequestError:
    async def requests() -> AsyncIterator[control_pb2.AttachRequest]:
        yield control_pb2.AttachRequest(register=register)

    async with connect(control_pb2_grpc.ControlServiceStub, cluster.inner) as stub:
        with pytest.raises(InvalidRequestError) as caught:
            async for _ in stub.Attach(requests()):
                pass
    return caught.value


async def test_the_policy_is_pushed_with_an_epoch(cluster: Cluster) -> None:
    async with fake(cluster) as a:
        await until(lambda: a.policies)
        policy = a.policies[0]
        assert (policy.name, policy.max_draft_tokens, policy.epoch.counter) == ("fixed:7", 7, 1)
        status = await cluster.status()
        assert (status.policy, status.policy_epoch) == ("fixed:7", f"{policy.epoch.boot_id}:1")


async def test_a_held_policy_of_a_later_boot_is_outbid(cluster: Cluster) -> None:
    """A clock that was set back must not leave replicas deaf to the new scheduler."""
    later = control_pb2.PolicyEpoch(boot_id=2**63, counter=4)
    async with fake(cluster, "a") as a:
        await until(lambda: a.policies)
        async with fake(cluster, "b", held_policy=control_pb2.Policy(epoch=later, name="off")) as b:
            await until(lambda: b.policies)
            await until(lambda: len(a.policies) == 2)
            for policy in (a.policies[-1], b.policies[-1]):
                assert (policy.epoch.boot_id, policy.epoch.counter, policy.name) == (2**63, 5, "fixed:7")
    assert cluster.metric("kadence_policy_epoch") == 5


async def test_status(cluster: Cluster) -> None:
    async with fake(cluster) as a, drafter(cluster):
        await ready(a)
        load = control_pb2.Load(running=3, waiting=2, kv_pages_used=5, kv_pages_total=9)
        load.stats.steps = 77
        load.policy_epoch.boot_id, load.policy_epoch.counter = 4, 2
        a.attachment.report_load(load)

        async def loaded() -> bool:
            return any(r.running == 3 for r in (await cluster.status()).replicas)

        await until(loaded)
        status = await cluster.status()
        by_kind = {r.kind: r for r in status.replicas}
        assert status.replicas[0].kind == "scheduler" and set(by_kind) == {"scheduler", "verifier", "drafter"}
        verifier = by_kind["verifier"]
        assert (verifier.replica_id, verifier.serves, verifier.state, verifier.pid) == (
            "verifier-a",
            "tiny",
            "ready",
            1,
        )
        assert (verifier.waiting, verifier.kv_pages_used, verifier.kv_pages_total) == (2, 5, 9)
        assert verifier.stats.steps == 77 and verifier.policy_epoch == "4:2" and verifier.address == a.address
        assert by_kind["drafter"].serves == "ngram"
        assert by_kind["scheduler"].metrics_address == cluster.service.metrics_address
        assert by_kind["scheduler"].address == cluster.service.address and by_kind["scheduler"].pid > 1


async def test_a_draining_verifier_gets_no_new_work(cluster: Cluster) -> None:
    async with fake(cluster, "a") as a, fake(cluster, "b") as b:
        await ready(a, b)
        a.attachment.drain()
        await until(lambda: cluster.service._fleet.live("verifier")[0].id == "verifier-b")
        results = await asyncio.gather(*(cluster.generate(ask(ids=PROMPT, max_tokens=3)) for _ in range(6)))
        assert all(result.reason == "LENGTH" for result in results) and not a.submits
        await a.kill()

        async def gone() -> bool:
            return "verifier-a" not in await cluster.states()

        await until(gone)  # it said goodbye, so it is not lost


async def test_attaching_again_disturbs_no_request(cluster: Cluster) -> None:
    async with fake(cluster, step_seconds=0.02) as a:
        await ready(a)
        task = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=60, ignore_eos=True)))
        await until(lambda: a.running)
        await a.attachment.close()
        again = Attachment(cluster.inner, a._register)
        await again.start()
        result = await task
        await again.close()
        assert len(result.token_ids) == 60 and a.streams == 1 and len(a.submits) == 1
