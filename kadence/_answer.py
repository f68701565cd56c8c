"""An answer while it arrives: messages of one stream in, chunks and the result out."""

from __future__ import annotations

from kadence import _convert
from kadence.errors import InternalError
from kadence.types import Chunk, GenerateResult
from kadence.v1 import inference_pb2


class Answer:
    """Collects one stream's messages. No I/O; the two clients feed it."""

    def __init__(self) -> None:
        self._started: inference_pb2.Started | None = None
        self._result: GenerateResult | None = None
        self._token_ids: list[int] = []
        self._texts: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether a message has arrived; from then on the request must not be tried anew."""
        return self._started is not None

    @property
    def finished(self) -> bool:
        """Whether the last message has arrived."""
        return self._result is not None

    @property
    def request_id(self) -> str:
        """The effective request id; empty before the first message."""
        return self._started.request_id if self._started else ""

    @property
    def result(self) -> GenerateResult:
        """The finished answer. Raises RuntimeError while it is not finished."""
        if self._result is None:
            raise RuntimeError("the answer is not finished: iterate the stream to its end first")
        return self._result

    def feed(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """Takes one message; returns what there is to show. Raises InternalError if the order of messages is broken."""
        event = response.WhichOneof("event")
        if event == "started" and self._started is None:
            self._started = response.started
            return None
        if event == "chunk" and self.begun and not self.finished:
            return self._chunk(tuple(response.chunk.token_ids), response.chunk.text)
        if event == "finished" and self.begun and not self.finished:
            return self._finish(response.finished)
        if event is None:  # an event of a later version
            return None
        raise InternalError(f"the server sent {event} out of order", request_id=self.request_id)

    def end(self) -> None:
        """The stream has ended without an error. Raises InternalError if the answer is not finished."""
        if not self.finished:
            raise InternalError("the server ended the stream before the answer", request_id=self.request_id)

    def _chunk(self, token_ids: tuple[int, ...], text: str) -> Chunk:
        self._token_ids.extend(token_ids)
        self._texts.append(text)
        return Chunk(token_ids, text)

    def _finish(self, finished: inference_pb2.Finished) -> Chunk | None:
        assert self._started is not None
        last = self._chunk((), finished.text) if finished.text else None
        self._result = GenerateResult(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=_convert.finish_reason(finished.reason),
            stats=_convert.stats(finished.stats),
            prompt_token_ids=tuple(self._started.prompt_token_ids),
            seed=self._started.seed,
            rule=_convert.rule(self._started.rule),
            model=self._started.model,
            request_id=self._started.request_id,
            stop_match=finished.stop_match,
            attempt=self._started.attempt,
        )
        return last
