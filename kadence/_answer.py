"""The answers to one request while they arrive, over one stream or several: messages in, chunks and results out."""

from __future__ import annotations

import dataclasses

from kadence import _convert
from kadence.errors import InternalError
from kadence.types import Chunk, GenerateResult, TokenLogprobs
from kadence.v1 import inference_pb2

_SEEDS = 2**64


class Answers:
    """Collects the messages of a request's streams. No I/O; the two clients feed it."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = request
        self._started: inference_pb2.Started | None = None
        self._parts: list[_Part] = []
        self._conflicts = 0
        self._whole: GenerateResult | None = None
        self.awaits_started = True
        """Whether the stream that is open has not brought its first message yet."""

    @property
    def begun(self) -> bool:
        """Whether a message has arrived; from then on a new stream goes on from what is held."""
        return self._started is not None

    @property
    def finished(self) -> bool:
        """Whether every answer has its last message."""
        return self.begun and all(part.finished is not None for part in self._parts)

    @property
    def request_id(self) -> str:
        """The effective request id; empty before the first message."""
        return self._started.request_id if self._started else ""

    @property
    def result(self) -> GenerateResult:
        """The finished answers. Raises RuntimeError while one of them is not finished."""
        if not self.finished:
            raise RuntimeError("the answer is not finished: iterate the stream to its end first")
        if self._whole is None:
            first, *others = (self._result(index) for index in range(len(self._parts)))
            self._whole = dataclasses.replace(first, alternatives=tuple(others))
        return self._whole

    def reopen(self) -> inference_pb2.GenerateRequest:
        """What the next stream asks for: the request, or once begun the rest of it.

        The prompt goes as the ids it became: a chat template may render today's date.
        """
        for part in self._parts:
            part.ended = False
        self.awaits_started = True
        if self._started is None:
            return self._request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.ClearField("prompt")
        del request.messages[:]
        request.request_id, request.model = self._started.request_id, self._started.model
        request.prompt_token_ids[:] = self._started.prompt_token_ids
        attempt = self._started.attempt + self._conflicts
        resume = inference_pb2.Resume(seed=self._started.seed, attempt=attempt, rule=self._started.rule)
        resume.token_ids.extend(self._parts[0].token_ids)
        for part in self._parts[1:]:
            resume.more.add(token_ids=part.token_ids)
        request.resume.CopyFrom(resume)
        return request

    def conflict(self) -> None:
        """The server holds a stream of this request that broke before it could say so; the next one outranks it."""
        self._conflicts += 1

    def feed(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """Takes one message; returns what there is to show. Raises InternalError if the order of messages is broken."""
        event = response.WhichOneof("event")
        if event is None:  # an event of a later version
            return None
        if event == "started":
            self._start(response.started)
            return None
        message = response.chunk if event == "chunk" else response.finished
        if self.awaits_started or message.index >= len(self._parts) or self._parts[message.index].ended:
            answer = f" of answer {message.index}" if message.index else ""
            raise self._error(f"the server sent {event}{answer} out of order")
        part = self._parts[message.index]
        if event == "finished":
            part.ended = True
        if part.finished is not None:  # before this stream, which only repeats its end
            return None
        return self._chunk(part, response.chunk) if event == "chunk" else self._finish(part, response.finished)

    def end(self) -> None:
        """The stream has ended without an error. Raises InternalError if an answer is not finished."""
        if not self.finished:
            raise self._error("the server ended the stream before the answer")

    def _start(self, started: inference_pb2.Started) -> None:
        if not self.awaits_started:
            raise self._error("the server sent started out of order")
        if self._started is None:
            self._parts = [_Part(index) for index in range(max(1, self._request.sampling.n))]
        elif (started.prompt_token_ids, started.seed) != (self._started.prompt_token_ids, self._started.seed):
            raise self._error("the server resumed another prompt or seed")
        self._started, self.awaits_started, self._conflicts = started, False, 0

    def _chunk(self, part: _Part, message: inference_pb2.Chunk) -> Chunk:
        chunk = Chunk(tuple(message.token_ids), message.text, part.index, _convert.logprobs(message))
        part.take(chunk)
        return chunk

    def _finish(self, part: _Part, message: inference_pb2.Finished) -> Chunk | None:
        _convert.finish_reason(message.reason)
        part.finished = message
        if not message.text:
            return None
        last = Chunk((), message.text, part.index)
        part.take(last)
        return last

    def _result(self, index: int) -> GenerateResult:
        part, started = self._parts[index], self._started
        assert started is not None and part.finished is not None
        return GenerateResult(
            text="".join(part.texts),
            token_ids=tuple(part.token_ids),
            finish_reason=_convert.finish_reason(part.finished.reason),
            stats=_convert.stats(part.finished.stats),
            prompt_token_ids=tuple(started.prompt_token_ids),
            seed=(started.seed + index) % _SEEDS,
            rule=_convert.rule(started.rule),
            model=started.model,
            request_id=started.request_id,
            stop_match=part.finished.stop_match,
            attempt=started.attempt,
            index=index,
            logprobs=tuple(part.logprobs),
        )

    def _error(self, message: str) -> InternalError:
        return InternalError(message, request_id=self.request_id)


class _Part:
    """One answer as far as it is known."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: inference_pb2.Finished | None = None
        self.ended = False
        """Whether the stream that is open has ended it."""

    def take(self, chunk: Chunk) -> None:
        self.token_ids.extend(chunk.token_ids)
        self.texts.append(chunk.text)
        self.logprobs.extend(chunk.logprobs)
