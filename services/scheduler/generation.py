"""What gRPC and HTTP share: an ask becomes n answers side by side, read as one stream of pieces and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from kadence.errors import APIError, DeadlineExceededError, RequestCancelledError, UnavailableError
from services.runtime import logs
from services.scheduler.answer import Answer
from services.scheduler.dispatch import Dispatcher
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.outcomes import End, Finish, FinishReason, Logprobs, Piece, Stats
from services.scheduler.prompts import Prompts
from services.scheduler.request import Ask, Limits, Request
from services.scheduler.session import Session
from services.scheduler.tokenizer import Tokenizer

_SHORTEST_PAUSE = 0.002  # a timer is not worth less

__all__ = ["End", "FinishReason", "Generation", "Intake", "Logprobs", "Piece", "Stats"]

_log = logging.getLogger(__name__)


class Generation:
    """One accepted ask. Its answers end when they end, at the deadline, or with `close`, whichever comes first."""

    def __init__(self, intake: Intake, sessions: list[Session], wake: asyncio.Event, deadline: float) -> None:
        self.request = first = sessions[0].request
        """Of answer 0."""
        self.request_id = first.request_id
        self.model = intake.limits().model
        self.prompt_token_ids = first.prompt_token_ids
        self.seed = first.sampling.seed
        """Of answer 0; answer i has seed + i modulo 2^64."""
        self.rule = first.sampling.rule
        self.attempt = max(session.attempt for session in sessions)
        self.n = len(sessions)
        self._intake = intake
        self._sessions = sessions
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._timer = self._loop.call_at(deadline, self._expire)

    async def events(self, *, coalesce: bool = True) -> AsyncIterator[Piece | End]:
        """Pieces as they come, answers interleaved, and each answer's End after its last piece; to be read once.

        With `coalesce`, pieces gather for as long as keeps all streams together within the scheduler's message rate.
        Raises the APIError that ended the request, once, after what had come before it; no End follows.
        """
        live = list(self._sessions)
        try:
            while live:
                self._wake.clear()
                moved = False
                for session in live:
                    if (piece := session.take()) is not None:
                        moved = True
                        yield piece
                over = [session for session in live if session.over]
                live = [session for session in live if session not in over]
                for session in over:
                    yield self._end(session)
                if not live:
                    return
                if moved and coalesce:
                    await self._intake.pause()
                await self._wake.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Ends whatever still runs, as cancelled, or as late from the deadline on. May be called again."""
        self._timer.cancel()
        if self._loop.time() >= self._deadline:
            self._expire()
        for session in self._sessions:
            session.end(RequestCancelledError("cancelled"))

    def _expire(self) -> None:
        for session in self._sessions:
            session.end(DeadlineExceededError("the request's time was up"))

    def _end(self, session: Session) -> End:
        outcome = session.outcome
        assert outcome is not None
        if not isinstance(outcome, Finish):
            outcome.request_id = self.request_id
            raise outcome
        answer = session.answer
        match = answer.stop_match or ""
        if outcome.stop_token_id >= 0:
            match = self._intake.token_text(outcome.stop_token_id)
        _log.info(
            "%s: %d prompt tokens, %d tokens in %.3f s",
            outcome.reason.name.lower(),
            len(self.prompt_token_ids),
            session.produced,
            self._loop.time() - session.accepted_at,
        )
        return End(session.request.index, outcome.reason, answer.finish(), match, session.stats, len(answer.token_ids))


class Intake:
    """Accepts asks, or refuses them with an APIError."""

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Tokenizer,
        limits: Callable[[], Limits],
        dispatcher: Dispatcher,
        metrics: SchedulerMetrics,
        *,
        default_timeout: float,
        max_chunks_per_second: int,
    ) -> None:
        self.limits = limits
        self.token_text = tokenizer.token_text
        self._prompts = prompts
        self._detokenizer = tokenizer.detokenizer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._default_timeout = default_timeout
        self._chunk_seconds = 1.0 / max_chunks_per_second
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Accepts nothing from now on; running answers go on."""
        self._closed = True

    async def open(self, ask: Ask, timeout: float | None) -> Generation:  # noqa: ASYNC109
        """The ask, accepted; it has `timeout` seconds, or as many as the configuration says. Raises APIError.

        Whoever opens one closes it: `events` does so at its end, and a caller that may drop it earlier must.
        """
        began = self._loop.time()
        try:
            return await self._accept(ask, began, began + (self._default_timeout if timeout is None else timeout))
        except APIError as error:
            self._metrics.refused(error)
            raise

    async def pause(self) -> None:
        """Lets a stream's next tokens gather for as long as keeps all streams together within their message rate."""
        seconds = self._dispatcher.running * self._chunk_seconds
        if seconds >= _SHORTEST_PAUSE:
            await asyncio.sleep(seconds)

    async def _accept(self, ask: Ask, began: float, deadline: float) -> Generation:
        if self._closed:
            raise UnavailableError("the scheduler is shutting down")
        self._dispatcher.check_room()
        requests = await self._prompts.understand(ask)
        logs.request_id.set(requests[0].request_id)
        wake = asyncio.Event()
        sessions = [Session(r, self._answer(r), began, wake) for r in requests]
        self._dispatcher.add(sessions)
        return Generation(self, sessions, wake, deadline)

    def _answer(self, request: Request) -> Answer:
        return Answer(self._detokenizer(), request.stop, request.sampling.min_tokens)
