"""One generation across the calls it takes: what each call sends, what came, and what a failure means."""

from __future__ import annotations

from typing import NamedTuple

from kadence import _core
from kadence._answer import Answers
from kadence.errors import APIError
from kadence.types import Chunk
from kadence.v1 import inference_pb2


class Opening(NamedTuple):
    """What the next call is made of; `timeout` in seconds."""

    request: inference_pb2.GenerateRequest
    timeout: float
    metadata: _core.Pairs


class Exchange:
    """The part of a stream that both clients share. No I/O and no clock: `now` is seconds of any one clock."""

    def __init__(self, settings: _core.Settings, prepared: _core.Prepared, now: float) -> None:
        self.answers = Answers(prepared.request)
        self.resumes = 0
        self._settings = settings
        self._prepared = prepared
        self._course = _core.Course(prepared.timeout, settings.retry, now)

    def open(self, now: float) -> Opening:
        """The next call. A token that is a function is asked anew for each. Raises ConfigError for a bad token."""
        request = self.answers.reopen()
        metadata = self._settings.authorized(self._prepared.metadata)
        return Opening(request, self._course.remaining(now), metadata)

    def feed(self, response: inference_pb2.GenerateResponse) -> Chunk | None:
        """Takes one message; returns what there is to show. Raises InternalError if it is out of order."""
        reopened = self.answers.begun and response.HasField("started")
        chunk = self.answers.feed(response)
        if reopened:
            self.resumes += 1
        if not response.HasField("started"):
            self._course.progress()
        return chunk

    def delay_after(self, error: APIError, now: float, chance: float) -> float | None:
        """Seconds to wait before the next call, or None if `error` is final; `chance` is random in [0, 1)."""
        answers = self.answers
        error.request_id = error.request_id or answers.request_id
        reopening = answers.begun and answers.awaits_started
        verdict = _core.verdict(error, answers.begun, reopening)
        if reopening and error.code == "ALREADY_EXISTS":
            answers.conflict()
        return self._course.delay_after(error, verdict, now, chance)
