"""Bookkeeping of Decode streams without an engine: whose requests are parked, and as which attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from kadence.internal import common_pb2
from kadence.internal import verifier_pb2 as pb
from kadence.v1 import types_pb2
from services.verifier.outcomes import Update
from services.verifier.request import FinishReason, Request, Terminal
from services.verifier.servicer import VerifierServicer
from tests.support.scheduling import until


class FakeEngine(SimpleNamespace):
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        super().__init__(broken=False, submitted=[], stopped=[])

    def submit(self, request: Request) -> None:
        self.submitted.append(request)

    def stop(self, request_id: str, attempt: int) -> None:
        self.stopped.append((request_id, attempt))


class Stream:
    """One Decode call; `end` loses it."""

    def __init__(self, servicer: VerifierServicer) -> None:
        self._outgoing: asyncio.Queue[pb.DecodeRequest | None] = asyncio.Queue()
        self.responses: list[pb.DecodeResponse] = []
        self._task = asyncio.create_task(self._run(servicer))

    def submit(self, name: str, attempt: int) -> None:
        sampling = common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=5, rule=types_pb2.RULE_MATCH)
        stamp = common_pb2.Stamp(request_id=name, attempt=attempt)
        submit = pb.Submit(stamp=stamp, prompt_token_ids=[1], sampling=sampling)
        self._outgoing.put_nowait(pb.DecodeRequest(submits=[submit]))

    async def end(self) -> None:
        self._outgoing.put_nowait(None)
        await self._task

    async def _run(self, servicer: VerifierServicer) -> None:
        async for response in servicer.Decode(self._requests(), None):
            self.responses.append(response)

    async def _requests(self) -> AsyncIterator[pb.DecodeRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message


def ended(request: Request) -> Update:
    terminal = Terminal(FinishReason.LENGTH)
    return Update(request.request_id, request.attempt, request.owner, 0, 1, [], terminal=terminal)


def servicer(grace: float = 0.0) -> tuple[VerifierServicer, Any]:
    engine: Any = FakeEngine()
    description = common_pb2.Description(vocab_size=10, max_model_len=100)
    return VerifierServicer(engine, description, 5.0, grace), engine


async def test_an_end_that_crosses_a_newer_attempt_leaves_that_one_parked() -> None:
    it, engine = servicer()
    stream = Stream(it)
    stream.submit("a", 0)
    stream.submit("a", 1)
    await until(lambda: len(engine.submitted) == 2)
    it.deliver(1, [ended(engine.submitted[0])])
    await stream.end()
    await until(lambda: engine.stopped == [("a", 1)])
    assert [u.stamp.attempt for r in stream.responses for u in r.updates] == [0]


async def test_what_ended_is_not_parked() -> None:
    it, engine = servicer()
    stream = Stream(it)
    for name in "abc":
        stream.submit(name, 0)
    await until(lambda: len(engine.submitted) == 3)
    it.deliver(1, [ended(engine.submitted[0])])
    await stream.end()
    it.deliver(2, [ended(engine.submitted[1])])  # nobody listens any more
    await until(lambda: bool(engine.stopped))
    assert engine.stopped == [("c", 0)]


async def test_updates_go_to_their_owners_in_one_message_each() -> None:
    it, engine = servicer()
    streams = [Stream(it), Stream(it)]
    for name, stream in (("a", streams[0]), ("b", streams[1]), ("c", streams[0])):
        stream.submit(name, 0)
        await until(lambda name=name: engine.submitted[-1:] and engine.submitted[-1].request_id == name)  # type: ignore[misc]
    it.deliver(7, [ended(request) for request in engine.submitted])
    for stream in streams:
        await stream.end()
    names = [[(r.step, [u.stamp.request_id for u in r.updates]) for r in s.responses] for s in streams]
    assert names == [[(7, ["a", "c"])], [(7, ["b"])]]


async def test_closing_forgets_the_parked() -> None:
    it, engine = servicer(grace=0.05)
    stream = Stream(it)
    stream.submit("a", 0)
    await until(lambda: bool(engine.submitted))
    await stream.end()
    await it.close()
    await asyncio.sleep(0.1)
    assert engine.stopped == []
