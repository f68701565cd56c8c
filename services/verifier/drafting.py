"""Asks the drafter for this step's drafts and waits no longer than they can gain; a missing draft means K = 0."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass

from kadence.internal import drafter_pb2
from services.verifier import messages
from services.verifier.draft import Draft
from services.verifier.drafter_link import DrafterLink
from services.verifier.request import Request

_MISSES_TO_SUSPEND = 2
_STEPS_WITHOUT_ROOM = 256  # before a drafter that had no room for a session is sent the whole text again


@dataclass
class DraftingCounters:
    """Totals since start."""

    asked: int = 0
    late: int = 0
    stale: int = 0
    resyncs: int = 0
    lost: int = 0
    wait_seconds: float = 0.0


@dataclass
class _Session:
    attempt: int
    sent: int  # tokens the drafter has been told
    opened: int  # the step that opened it


class Drafting:
    """The engine's view of the drafter. Everything here runs in the engine's thread."""

    def __init__(self, link: DrafterLink, vocab_size: int) -> None:
        self._link = link
        self._vocab_size = vocab_size
        self._generation = 0
        self._sessions: dict[str, _Session] = {}
        self._closes: list[tuple[str, int]] = []
        self._without_room: dict[str, int] = {}  # request id -> step at which it is tried again
        self._asked: dict[str, tuple[Request, int]] = {}
        self._step = 0
        self._misses = 0
        self.counters = DraftingCounters()

    @property
    def rows(self) -> str:
        """Fingerprint of what makes the feature rows that the drafter reads; "" while there is none that reads any."""
        connection = self._link.connection
        return connection.rows if connection is not None else ""

    def ask(self, step: int, wants: list[tuple[Request, int]]) -> None:
        """Sends new tokens of, and a propose for, each (request, most tokens wanted)."""
        self._asked = {}
        connection = self._link.connection
        if connection is None or not wants:
            return
        if connection.generation != self._generation:
            self._generation = connection.generation
            self._sessions.clear()
            self._closes.clear()
            self._without_room.clear()
        message = messages.DraftRequestBuilder(step)
        for request_id, attempt in self._closes:
            message.close(request_id, attempt)
        self._closes.clear()
        for request, most in wants:
            most = min(most, connection.max_draft_tokens or most)
            if most > 0 and self._catch_up(message, request, connection.max_sessions):
                message.propose(request, most)
                self._asked[request.request_id] = (request, most)
        if self._asked:
            self._step = step
            self.counters.asked += 1
            self._link.send(message.request)

    def collect(self, deadline: float) -> dict[str, Draft]:
        """Drafts by request id, waiting at most `deadline` seconds; requests without one are absent."""
        if not self._asked:
            return {}
        start = time.monotonic()
        response = self._await_step(start + deadline)
        self.counters.wait_seconds += time.monotonic() - start
        if response is None:
            return {}
        self._misses = 0
        for resync in response.resyncs:
            self._resync(resync.stamp.request_id, resync.have)
        return dict(filter(None, (self._accept(draft) for draft in response.drafts)))

    def forget(self, request: Request) -> None:
        """The request ended; its session is closed with the next message."""
        self._without_room.pop(request.request_id, None)
        if self._sessions.pop(request.request_id, None) is not None:
            self._closes.append((request.request_id, request.attempt))

    def flush(self) -> None:
        """Sends what waits for a next step; called when there is none in sight."""
        connection = self._link.connection
        if self._closes and connection is not None and connection.generation == self._generation:
            message = messages.DraftRequestBuilder(0)
            for request_id, attempt in self._closes:
                message.close(request_id, attempt)
            self._link.send(message.request)
        self._closes.clear()

    def _catch_up(self, message: messages.DraftRequestBuilder, request: Request, max_sessions: int) -> bool:
        """Adds what the drafter does not know of the request yet; False if it has no room for it."""
        session = self._sessions.get(request.request_id)
        if session is not None and session.attempt != request.attempt:
            self._sessions.pop(request.request_id)
            session = None
        if session is None:
            if max_sessions and len(self._sessions) >= max_sessions:
                return False
            if message.request.step < self._without_room.get(request.request_id, 0):
                return False
            session = self._sessions[request.request_id] = _Session(request.attempt, 0, message.request.step)
            message.open(request)
        if session.sent < len(request.tokens):
            message.commit(request, session.sent)
            session.sent = len(request.tokens)
        return True

    def _await_step(self, until: float) -> drafter_pb2.DraftResponse | None:
        while True:
            try:
                response = self._link.replies.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._missed()
                return None
            if response is None:  # a connection was lost, perhaps an earlier one
                if self._link.connection is None or self._link.connection.generation != self._generation:
                    self.counters.lost += 1
                    return None
            elif response.step == self._step:
                return response
            else:
                self.counters.stale += len(response.drafts)

    def _missed(self) -> None:
        self.counters.late += 1
        self._misses += 1
        if self._misses >= _MISSES_TO_SUSPEND:
            self._misses = 0
            self._link.suspend()

    def _resync(self, request_id: str, have: int) -> None:
        self.counters.resyncs += 1
        session = self._sessions.get(request_id)
        if session is None:
            return
        if have == 0:
            self._sessions.pop(request_id)
            if session.opened == self._step:  # other verifiers' sessions fill the drafter
                self._without_room[request_id] = self._step + _STEPS_WITHOUT_ROOM
        else:
            session.sent = min(session.sent, have)

    def _accept(self, draft: drafter_pb2.Draft) -> tuple[str, Draft] | None:
        """The draft if it is for a request of this step as it stands now, and makes sense."""
        request, most = self._asked.get(draft.stamp.request_id, (None, 0))
        if request is None or messages.stamp_of(request) != draft.stamp:
            self.counters.stale += 1
            return None
        tokens = list(draft.token_ids[:most])
        if not all(0 <= token < self._vocab_size for token in tokens):
            self.counters.stale += 1
            return None
        return request.request_id, Draft(tokens)
