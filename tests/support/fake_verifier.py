"""A verifier without a model: a real servicer that attaches for real and commits the tokens a script gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kadence.internal import common_pb2, control_pb2, verifier_pb2, verifier_pb2_grpc
from kadence.v1 import types_pb2
from services.runtime.attach import Attachment
from services.runtime.config import ServiceConfig
from services.runtime.inproc import InprocServer
from services.runtime.metrics import Metrics
from services.runtime.server import GrpcServer
from tests.support import tiny_model

Script = Callable[[verifier_pb2.Submit], Sequence[int]]


def counting(submit: verifier_pb2.Submit) -> Sequence[int]:
    """An answer that is a function of the prompt alone: any verifier continues it the same way."""
    return [2 + (sum(submit.prompt_token_ids) + i) % 300 for i in range(submit.sampling.max_tokens)]


def seeded(submit: verifier_pb2.Submit) -> Sequence[int]:
    """An answer that is a function of prompt and seed alone."""
    first = sum(submit.prompt_token_ids) + 7 * submit.sampling.seed
    return [2 + (first + i) % 300 for i in range(submit.sampling.max_tokens)]


def logprobs(token: int, count: int) -> types_pb2.TokenLogprobs:
    """What it says of a token: a made-up law in which the ids from `token` - 1 on are the likeliest."""
    ids = [(token - 1 + i) % tiny_model.VOCAB_SIZE for i in range(count)]
    return types_pb2.TokenLogprobs(logprob=-1.5, top_token_ids=ids, top_logprobs=[-1.0 - 0.5 * i for i in range(count)])


@dataclass(eq=False)
class Running:
    """A request at this verifier; its answer is known from the start."""

    submit: verifier_pb2.Submit
    answer: Sequence[int]
    done: int


@dataclass(eq=False)
class FakeVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """`async with` serves and attaches it. Each step commits `per_step` tokens to each request."""

    scheduler: str
    replica_id: str = "verifier-a"
    inproc_name: str = ""
    script: Script = counting
    per_step: int = 3
    step_seconds: float = 0.002
    max_sessions: int = 8
    max_model_len: int = 0
    model: str = "tiny"
    vocab_size: int = tiny_model.VOCAB_SIZE
    held_policy: control_pb2.Policy | None = None
    submits: list[verifier_pb2.Submit] = field(default_factory=list)
    stops: list[common_pb2.Stamp] = field(default_factory=list)
    policies: list[control_pb2.Policy] = field(default_factory=list)
    drafters: list[list[str]] = field(default_factory=list)
    running: dict[tuple[str, int], Running] = field(default_factory=dict)
    refuse: tuple[str, str] | None = None
    """(code, message) that every new request fails with."""
    cached: int = 0
    """Prompt tokens it says it has reused, of every request."""

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        """Steps run while it is set."""
        self.gate.set()
        self.streams = 0
        self._out: asyncio.Queue[verifier_pb2.DecodeResponse | None] = asyncio.Queue()
        self._step = 0
        if self.inproc_name:
            self._server: Any = InprocServer(self.inproc_name)
        else:
            self._server = GrpcServer(ServiceConfig(), Metrics("verifier"))
        register = verifier_pb2_grpc.add_VerifierServiceServicer_to_server
        self._server.add(register, self, "kadence.internal.VerifierService")
        self.attachment = Attachment(
            self.scheduler,
            self._register,
            on_policy=self.policies.append,
            on_drafters=lambda peers: self.drafters.append([peer.replica_id for peer in peers.peers]),
        )

    async def __aenter__(self) -> FakeVerifier:
        self.address = await self._server.start()
        await self.attachment.start()
        self._engine = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Dies without a word."""
        self._engine.cancel()
        await self._server.drain(0)
        await self.attachment.close()

    def hang_up(self) -> None:
        """Ends the Decode stream, and no more."""
        self._out.put_nowait(None)

    def fail(self, request_id: str, code: str, message: str) -> None:
        """Fails a running request."""
        key = next(key for key in self.running if key[0] == request_id)
        failed = self._update(self.running.pop(key), [], types_pb2.FINISH_REASON_FAILED)
        failed.terminal.error_code, failed.terminal.error_message = code, message
        self._say(failed)

    def description(self) -> common_pb2.Description:
        return common_pb2.Description(
            kind="verifier",
            replica_id=self.replica_id,
            model=self.model,
            vocab_size=self.vocab_size,
            max_sessions=self.max_sessions,
            max_model_len=self.max_model_len,
        )

    def _register(self) -> control_pb2.Register:
        return control_pb2.Register(
            description=self.description(), address=self.address, pid=1, held_policy=self.held_policy
        )

    async def DescribeVerifier(self, request: Any, context: Any) -> verifier_pb2.DescribeVerifierResponse:
        return verifier_pb2.DescribeVerifierResponse(verifier=self.description())

    async def Decode(self, request_iterator: Any, context: Any) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        self.streams += 1
        self._out = out = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator))
        context.add_done_callback(lambda _: reader.cancel())
        while (response := await out.get()) is not None:
            yield response

    async def _read(self, requests: AsyncIterator[verifier_pb2.DecodeRequest]) -> None:
        async for request in requests:
            for stop in request.stops:
                self.stops.append(stop.stamp)
                key = (stop.stamp.request_id, stop.stamp.attempt)
                if (running := self.running.pop(key, None)) is not None:
                    self._say(self._update(running, [], types_pb2.FINISH_REASON_CANCELLED))
            for submit in request.submits:
                self.submits.append(submit)
                entry = Running(submit, self.script(submit), len(submit.committed_token_ids))
                if self.refuse is not None:
                    failed = self._update(entry, [], types_pb2.FINISH_REASON_FAILED)
                    failed.terminal.error_code, failed.terminal.error_message = self.refuse
                    self._say(failed)
                else:
                    self.running[submit.stamp.request_id, submit.stamp.attempt] = entry

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            await self.gate.wait()
            updates = [self._advance(key, entry) for key, entry in list(self.running.items())]
            if updates:
                self._step += 1
                self._say(*updates)

    def _advance(self, key: tuple[str, int], entry: Running) -> verifier_pb2.RequestUpdate:
        sampling, tokens = entry.submit.sampling, []
        first = entry.done == len(entry.submit.committed_token_ids)
        reason = types_pb2.FINISH_REASON_UNSPECIFIED
        before = entry.done
        for token in entry.answer[before : before + (1 if first else self.per_step)]:
            tokens.append(token)
            if token in sampling.stop_token_ids:
                reason = types_pb2.FINISH_REASON_STOP
                break
        if not reason and before + len(tokens) >= min(len(entry.answer), sampling.max_tokens):
            reason = types_pb2.FINISH_REASON_LENGTH
        if reason:
            del self.running[key]
        update = self._update(entry, tokens, reason)
        if first:
            update.cached_tokens = self.cached
        else:
            update.decode_step, update.drafted, update.verified = True, 7, 5
            update.accepted = len(tokens) - 1
        entry.done += len(tokens)
        return update

    @staticmethod
    def _update(entry: Running, tokens: list[int], reason: types_pb2.FinishReason) -> verifier_pb2.RequestUpdate:
        stamp = common_pb2.Stamp()
        stamp.CopyFrom(entry.submit.stamp)
        stamp.base_length = len(entry.submit.prompt_token_ids) + entry.done
        terminal = None
        if reason:
            stopped = reason == types_pb2.FINISH_REASON_STOP
            terminal = verifier_pb2.Terminal(reason=reason, stop_token_id=tokens[-1] if stopped else -1)
        update = verifier_pb2.RequestUpdate(stamp=stamp, token_ids=tokens, terminal=terminal)
        if (sampling := entry.submit.sampling).HasField("logprobs"):
            update.logprobs.extend(logprobs(token, sampling.logprobs) for token in tokens)
        return update

    def _say(self, *updates: verifier_pb2.RequestUpdate) -> None:
        self._out.put_nowait(verifier_pb2.DecodeResponse(step=self._step, updates=updates))
