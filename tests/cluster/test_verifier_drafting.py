"""A real verifier with a drafter that dies, hangs, comes late or does not fit: nothing changes but speed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import ConfigError
from kadence.internal import common_pb2, control_pb2, drafter_pb2, drafter_pb2_grpc
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.runtime import config as runtime_config
from services.runtime.heartbeat import beat
from services.runtime.inproc import InprocServer
from services.verifier.drafter_link import Side, check_drafter
from services.verifier.target import Target
from tests.contract.fake_scheduler import Answer, FakeScheduler, serving
from tests.support.decoding import Client, Verifier, client, running
from tests.support.engine_harness import Harness, request
from tests.support.scheduling import until
from tests.support.tiny_llama import TinyLlama

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 5, 6]  # greedy text soon runs in circles, so that n-grams are found and accepted
COUNT = 2500


@pytest.fixture(scope="module")
def truth(tiny_llama: TinyLlama) -> list[int]:
    """The plain continuation; its beginning is checked against transformers."""
    harness = Harness(Target(tiny_llama.folder, "float32"), max_model_len=4096)
    tokens = harness.run([request("a", PROMPT, COUNT)])["a"].tokens
    tiny_llama.assert_same(PROMPT, tokens[:200], tiny_llama.generate(PROMPT, 200))
    return tokens


class Scene:
    """A verifier, its scheduler and whatever drafters a test offers to it."""

    def __init__(self, verifier: Verifier, scheduler: FakeScheduler, client: Client) -> None:
        self.verifier, self.scheduler, self.client = verifier, scheduler, client

    def offer(self, *addresses: str) -> None:
        """The scheduler's list of drafters."""
        peers = [control_pb2.Peer(replica_id=address, address=address) for address in addresses]
        self.scheduler.say.put_nowait(Answer(drafters=control_pb2.Peers(peers=peers)))

    def verified(self, since: int = 0) -> list[int]:
        """K of the steps from the `since`-th on."""
        return [update.verified for update in self.client.of("a").updates[since:]]

    async def drafting(self, seconds: float = 15) -> None:
        """Until drafts are verified from now on."""
        since = len(self.client.of("a").updates)
        await until(lambda: any(self.verified(since)), seconds)

    async def plain(self, steps: int = 20, seconds: float = 15) -> None:
        """Until so many steps in a row went without a draft."""
        await until(lambda: len(self.verified()) > steps and not any(self.verified()[-steps:]), seconds)

    async def finish(self, llama: TinyLlama, truth: list[int]) -> None:
        """Ends the request and compares what it said."""
        self.client.stop("a")
        await self.client.ended("a")
        heard = self.client.of("a")
        heard.check("CANCELLED", len(PROMPT))
        llama.assert_same(PROMPT, heard.tokens, truth[: len(heard.tokens)])
        assert len(heard.tokens) < COUNT, "too fast to tell"
        await self.verifier.check_empty()

    async def events(self, kind: str) -> float:
        return await self.verifier.metric(f'kadence_drafter_events_total{{event="{kind}"}}')


@asynccontextmanager
async def scene(llama: TinyLlama, **settings: Any) -> AsyncIterator[Scene]:
    """One long request is running, undrafted, under policy fixed:7."""
    scheduler = FakeScheduler()
    async with (
        serving("inproc", scheduler) as address,
        running("grpc", llama.folder, scheduler=address, heartbeat_seconds=1.0, **settings) as verifier,
        client(verifier) as stream,
    ):
        verifier.throttle(0.005)
        await until(lambda: bool(scheduler.of("register")))
        epoch = control_pb2.PolicyEpoch(boot_id=1, counter=1)
        scheduler.say.put_nowait(Answer(policy=control_pb2.Policy(name="fixed:7", max_draft_tokens=7, epoch=epoch)))
        stream.submit("a", PROMPT, COUNT)
        await until(lambda: len(stream.of("a").tokens) > 30)
        yield Scene(verifier, scheduler, stream)


class DrafterProcess:
    """`python -m services.drafter`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address

    @classmethod
    async def start(cls) -> DrafterProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.drafter", cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        word, _, address, _ = (await process.stdout.readline()).decode().split()
        assert word == "READY"
        return cls(process, address)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def drafter() -> AsyncIterator[DrafterProcess]:
    it = await DrafterProcess.start()
    yield it
    await it.end()


@asynccontextmanager
async def local_drafter(name: str, **settings: Any) -> AsyncIterator[DrafterService]:
    """A drafter inside this process."""
    overrides = {f"drafter.{key}": value for key, value in settings.items()}
    service = DrafterService(runtime_config.load(DrafterConfig, None, "drafter", overrides), inproc_name=name)
    await service.start()
    try:
        yield service
    finally:
        await service.drain(0)


async def test_drafts_are_verified_and_the_text_is_the_same(tiny_llama: TinyLlama, truth: list[int]) -> None:
    async with local_drafter("ngram") as drafter, scene(tiny_llama) as it:
        assert not any(it.verified())
        it.offer(drafter.address)
        await it.drafting()
        updates = it.client.of("a").updates
        await until(lambda: sum(u.accepted for u in updates) > 100)
        assert max(it.verified()) == 7
        assert all(len(u.token_ids) == u.accepted + 1 for u in updates)
        await it.finish(tiny_llama, truth)
        await until(lambda: drafter._engine.sessions == 0)
        verified = await it.verifier.metric("kadence_spec_decode_num_verified_tokens_total")
        assert verified == sum(u.verified for u in updates)


async def test_killed_and_replaced(tiny_llama: TinyLlama, truth: list[int], drafter: DrafterProcess) -> None:
    async with scene(tiny_llama, draft_deadline_seconds=10.0) as it:
        it.offer(drafter.address)
        await it.drafting()
        drafter.process.kill()
        await it.plain()
        assert it.verifier.service._drafting.counters.late == 0  # the loss is seen, not waited out
        async with local_drafter("ngram") as other:
            it.offer(drafter.address, other.address)
            await it.drafting()
            await it.finish(tiny_llama, truth)


async def test_hung_and_back(tiny_llama: TinyLlama, truth: list[int], drafter: DrafterProcess) -> None:
    """Two missed deadlines suspend it; when it answers again it drafts again, told what it missed."""
    async with scene(tiny_llama, draft_deadline_seconds=0.3) as it:
        it.offer(drafter.address)
        await it.drafting()
        drafter.process.send_signal(signal.SIGSTOP)
        await it.plain()
        assert it.verifier.service._drafting.counters.late >= 2
        assert it.verifier.service._link.connection is None
        drafter.process.send_signal(signal.SIGCONT)
        await it.drafting()
        await it.finish(tiny_llama, truth)
        assert await it.events("late") >= 2


class SlowDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers every step `delay` seconds late, with tokens that are never right."""

    def __init__(self, delay: float, **describes: Any) -> None:
        self.delay, self.describes = delay, describes
        self.streams = self.asked = 0

    async def DescribeDrafter(self, request: Any, context: Any) -> drafter_pb2.DescribeDrafterResponse:
        return drafter_pb2.DescribeDrafterResponse(
            drafter=common_pb2.Description(kind="drafter", drafter_kind="slow", **self.describes)
        )

    async def Draft(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        self.streams += 1
        outgoing: asyncio.Queue[drafter_pb2.DraftResponse] = asyncio.Queue()

        async def read() -> None:
            async for message in requests:
                if message.proposes:
                    self.asked += 1
                    drafts = [drafter_pb2.Draft(stamp=wish.stamp, token_ids=[7] * 7) for wish in message.proposes]
                    answer = drafter_pb2.DraftResponse(step=message.step, drafts=drafts)
                    asyncio.get_running_loop().call_later(self.delay, outgoing.put_nowait, answer)

        def say(heartbeat: common_pb2.Heartbeat) -> None:
            outgoing.put_nowait(drafter_pb2.DraftResponse(heartbeat=heartbeat))

        tasks = [asyncio.create_task(read()), asyncio.create_task(beat(say, 0.2))]
        try:
            while True:
                yield await outgoing.get()
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def slow_drafter(delay: float, **describes: Any) -> AsyncIterator[SlowDrafter]:
    servicer, server = SlowDrafter(delay, **describes), InprocServer("slow")
    server.add(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, servicer, "kadence.internal.DrafterService")
    await server.start()
    try:
        yield servicer
    finally:
        await server.drain(0)


async def test_late_drafter_is_suspended_and_tried_again(tiny_llama: TinyLlama, truth: list[int]) -> None:
    """Two late answers a connection and no more; in between the steps wait for nobody."""
    async with slow_drafter(0.4) as slow, scene(tiny_llama, draft_deadline_seconds=0.02) as it:
        it.offer("inproc://slow")
        await until(lambda: slow.streams >= 3)
        assert slow.asked <= 2 * slow.streams
        assert not any(it.verified())
        await it.finish(tiny_llama, truth)
        assert await it.events("late") >= 4


async def test_wrong_drafts_in_time_cost_nothing_but_rows(tiny_llama: TinyLlama, truth: list[int]) -> None:
    async with slow_drafter(0.0) as slow, scene(tiny_llama) as it:
        it.offer("inproc://slow")
        await it.drafting()
        await until(lambda: slow.asked > 50)
        updates = it.client.of("a").updates
        assert sum(u.accepted for u in updates) <= 0.1 * sum(u.verified for u in updates)
        await it.finish(tiny_llama, truth)


@pytest.mark.parametrize(
    ("describes", "says"),
    [
        ({"vocab_size": 331}, "the drafter's vocabulary is 331, the target's is 330"),
        ({"model_fingerprint": "abc"}, "the drafter's target fingerprint is abc, the target's is "),
        ({"feature_width": 64}, "the drafter's taps are"),
    ],
)
async def test_drafter_of_another_target_is_never_asked(
    tiny_llama: TinyLlama, truth: list[int], describes: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with slow_drafter(0.0, **describes) as slow, scene(tiny_llama) as it:
        it.offer("inproc://slow")
        await until(lambda: says in caplog.text)
        await until(lambda: it.scheduler.of("load")[-1].drafter_problem.startswith(says))
        assert not it.scheduler.of("load")[-1].drafter
        await it.plain()
        assert slow.streams == 0
        await it.finish(tiny_llama, truth)


def test_handshake_accepts_what_fits() -> None:
    target = common_pb2.Description(vocab_size=330, model_fingerprint="abc")
    side = Side(target, num_layers=4, hidden_size=64)
    for drafter in (common_pb2.Description(), target, common_pb2.Description(vocab_size=330)):
        check_drafter(side, drafter)
    with pytest.raises(ConfigError, match="vocabulary is 1, the target's is 330"):
        check_drafter(side, common_pb2.Description(vocab_size=1))
    with pytest.raises(ConfigError, match="fingerprint is abd, the target's is abc"):
        check_drafter(side, common_pb2.Description(model_fingerprint="abd"))


@pytest.mark.parametrize("taps", [[], [3], [0, 3], [2, 0], [1, 1], [-1, 0], [0, 99]])
def test_handshake_refuses_taps_that_the_target_does_not_have(taps: list[int]) -> None:
    side = Side(common_pb2.Description(), num_layers=4, hidden_size=64)
    drafter = common_pb2.Description(feature_width=64, feature_fingerprint="f", taps=[0, 1, 2])
    check_drafter(side, drafter)
    del drafter.taps[:]
    drafter.taps.extend(taps)
    with pytest.raises(ConfigError) as error:
        check_drafter(side, drafter)
    assert str(taps) in str(error.value) and "0..2" in str(error.value)


async def test_drafter_no_longer_offered_is_left(tiny_llama: TinyLlama, truth: list[int]) -> None:
    """The scheduler moves a verifier to another drafter, and to none."""
    async with AsyncExitStack() as stack:
        drafters = [await stack.enter_async_context(local_drafter(name)) for name in ("one", "two")]
        it = await stack.enter_async_context(scene(tiny_llama))
        for drafter in drafters:
            it.offer(drafter.address)
            await until(lambda drafter=drafter: drafter._engine.sessions == 1)  # type: ignore[misc]
            await it.drafting()
            wanted = drafter.address
            await until(lambda wanted=wanted: it.scheduler.of("load")[-1].drafter == wanted)  # type: ignore[misc]
        assert drafters[0]._engine.sessions == 0
        it.offer()
        await until(lambda: not it.scheduler.of("load")[-1].drafter)
        await it.plain()
        await it.finish(tiny_llama, truth)


async def test_drafter_with_little_room(tiny_llama: TinyLlama) -> None:
    """Two sessions and three tokens are all it has: others decode plainly, all say what they should."""
    async with local_drafter("small", max_sessions=2, max_draft_tokens=3) as drafter, scene(tiny_llama) as it:
        it.offer(drafter.address)
        await it.drafting()
        for name in "bcd":
            it.client.submit(name, PROMPT, 300)
        await it.client.ended(*"bcd")
        steps = [[update.verified for update in response.updates] for response in it.client.responses]
        assert max(map(max, steps)) == 3
        assert max(len(counts) for counts in steps) == 4
        assert max(sum(count > 0 for count in counts) for counts in steps) == 2
        assert len({tuple(it.client.of(name).tokens) for name in "bcd"}) == 1
        it.client.stop("a")
        await it.client.ended("a")
        await it.verifier.check_empty()
