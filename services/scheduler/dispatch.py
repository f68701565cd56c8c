"""Keeps every accepted request moving: queue, verifier, and on to another verifier when one is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from kadence.errors import APIError, ConflictError, OverloadedError, RequestCancelledError, UnavailableError
from services.scheduler import admission, routing
from services.scheduler.admission import Verdict
from services.scheduler.links import VerifierLink
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.session import Session

MAX_MOVES = 3
"""Verifiers a request may lose; one that kills them must not kill them all."""
_SMOOTHING = 0.1

_log = logging.getLogger(__name__)


class Dispatcher:
    """The accepted answers, first come first served, and the links they run on. Nothing here waits.

    The answers of one request come together and fail together; apart from that each goes its own way.
    """

    def __init__(self, metrics: SchedulerMetrics, *, max_queue: int, max_in_flight: int, attach_wait: float) -> None:
        self._metrics = metrics
        self._max_queue = max_queue
        self._max_in_flight = max_in_flight
        self._attach_wait = attach_wait
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, Session] = {}
        """By key."""
        self._together: dict[str, list[Session]] = {}
        """All answers of each request that still has a running one, by request id."""
        self._queue: deque[Session] = deque()
        self._running: dict[str, VerifierLink] = {}
        self._links: dict[str, VerifierLink] = {}
        self._deserted_at: float | None = self._loop.time()
        """Since when no link is ready; None while one is."""
        self._give_up: asyncio.TimerHandle | None = None
        self._seconds_per_request = 1.0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Answers accepted and not yet ended."""
        return len(self._sessions)

    @property
    def queued(self) -> int:
        """Answers that wait for a verifier."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Answers at a verifier."""
        return len(self._running)

    def check_room(self, count: int = 1) -> None:
        """Raises OverloadedError if a request for `count` answers that comes now would be refused."""
        verdict = admission.admit(queued=self.queued, max_queue=self._max_queue, free=self._free(), count=count)
        if verdict is Verdict.REFUSE:
            wait = admission.retry_after(
                queued=self.queued, running=self.running, seconds_per_request=self._seconds_per_request
            )
            more = f" and {count} answers are asked for" if count > 1 else ""
            raise OverloadedError(f"{self.queued} requests wait, at most {self._max_queue} may{more}", retry_after=wait)

    def add(self, sessions: Sequence[Session]) -> None:
        """Accepts a request's answers, all or none. Raises OverloadedError, or ConflictError if its id is in use.

        A resumed request takes over from the stream it resumes, which may not have noticed yet that it broke.
        """
        self.check_room(len(sessions))
        self._take_over(sessions)
        self._together[sessions[0].request.request_id] = list(sessions)
        self._metrics.accepted(sessions[0])
        for session in sessions:
            session.on_end = self._on_end
            self._sessions[session.request.key] = session
        self._idle.clear()
        for session in sessions:
            session.prime()
        self._queue.extend(session for session in sessions if session.outcome is None)
        self._pump()

    def _take_over(self, sessions: Sequence[Session]) -> None:
        """Ends the stream that these answers resume, if it is still there."""
        request_id = sessions[0].request.request_id
        held = self._together.get(request_id)
        if held is None:
            return
        if sessions[0].attempt <= held[0].request.attempt:
            raise ConflictError(f"request id {request_id!r} is in use", request_id=request_id)
        newest = max(session.attempt for session in held)
        for session in sessions:
            session.attempt = max(session.attempt, newest + 1)
        error = RequestCancelledError("resumed by another stream", request_id=request_id)
        for session in held:
            session.end(error)

    def attach(self, link: VerifierLink) -> None:
        """Begins to use a link once it is ready."""
        self._links[link.replica.id] = link

    def detach(self, link: VerifierLink) -> None:
        """Stops using a link; it is closed by its owner."""
        if self._links.get(link.replica.id) is link:
            del self._links[link.replica.id]

    def link_up(self) -> None:
        """A link became ready, or the state of its replica changed."""
        self._pump()

    def link_down(self, link: VerifierLink, reason: str, sessions: list[Session]) -> None:
        """Moves the requests a verifier lost to the head of the queue; they go on from what they have committed."""
        for session in reversed(sessions):
            if session.outcome is not None:  # it failed with another answer of its request, a moment ago
                continue
            self._running.pop(session.request.key, None)
            session.failed_on, session.loss = link.replica.id, f"verifier {link.replica.id} was lost: {reason}"
            session.attempt += 1
            session.moves += 1
            if session.moves > MAX_MOVES:
                session.end(UnavailableError(f"lost {session.moves} verifiers; {session.loss}"))
            else:
                session.queued_at = self._loop.time()
                self._queue.appendleft(session)
        if sessions:
            _log.warning("%d requests move on from verifier %s: %s", len(sessions), link.replica.id, reason)
        self._pump()

    async def drained(self, seconds: float) -> None:
        """Returns once no request is left; after `seconds` those that are left end with UNAVAILABLE."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for session in list(self._sessions.values()):
                session.end(UnavailableError("the scheduler is shutting down"))

    def _free(self) -> int:
        free = sum(max(0, c.capacity - c.in_flight) for c in (link.candidate() for link in self._links.values()))
        return admission.places(in_flight=self.running, max_in_flight=self._max_in_flight, free_of_verifiers=free)

    def _pump(self) -> None:
        """Sends requests on while there is room for them."""
        while self._queue and self.running < self._max_in_flight:
            session = self._queue[0]
            chosen = routing.choose([link.candidate() for link in self._links.values()], avoid=session.failed_on)
            if chosen is None:
                break
            self._queue.popleft()
            self._running[session.request.key] = self._links[chosen]
            self._metrics.submitted(session, self._loop.time())
            self._links[chosen].submit(session)
        self._watch()

    def _watch(self) -> None:
        """While requests wait and no verifier is there, the patience of the eldest is timed."""
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        if any(link.ready and link.replica.state == "ready" for link in self._links.values()):
            self._deserted_at = None
            return
        if self._deserted_at is None:
            self._deserted_at = self._loop.time()
        if self._queue:
            self._give_up = self._loop.call_at(min(map(self._patience, self._queue)), self._abandon)

    def _patience(self, session: Session) -> float:
        """When a queued request gives up waiting for a verifier to appear."""
        return max(self._deserted_at or 0.0, session.queued_at) + self._attach_wait

    def _abandon(self) -> None:
        now = self._loop.time()
        for session in [s for s in self._queue if self._patience(s) <= now]:
            session.end(UnavailableError(session.loss or "no verifier is attached"))
        self._watch()

    def _on_end(self, session: Session) -> None:
        key, now = session.request.key, self._loop.time()
        del self._sessions[key]
        link = self._running.pop(key, None)
        if link is not None:
            link.release(session)
            self._seconds_per_request += _SMOOTHING * (now - session.accepted_at - self._seconds_per_request)
        elif session in self._queue:
            self._queue.remove(session)
        if not self._sessions:
            self._idle.set()
        self._settle(session, now)
        self._pump()

    def _settle(self, session: Session, now: float) -> None:
        """Counts an end; a failure is counted once and ends the other answers of its request too."""
        together = self._together[session.request.request_id]
        failed = isinstance(session.outcome, APIError)
        first = not any(s is not session and isinstance(s.outcome, APIError) for s in together)
        if first or not failed:
            self._metrics.ended(session, now)
        if first and isinstance(session.outcome, APIError):
            for other in together:
                other.end(session.outcome)
        if all(s.outcome is not None for s in together):
            self._together.pop(session.request.request_id, None)
