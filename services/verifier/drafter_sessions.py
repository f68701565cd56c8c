"""What the drafter has been told of each request, within the room and the window that it advertises."""

from __future__ import annotations

from dataclasses import dataclass

from services.verifier.drafter_link import Connection
from services.verifier.features import FeatureStore
from services.verifier.request import Request

_STEPS_WITHOUT_ROOM = 256  # before a drafter that had no room for a session is sent the whole text again


@dataclass(slots=True)
class Session:
    """One request's session at the drafter.

    text   [ ------- tokens sent ------- | to be sent ]
    rows         [ ---- rows sent ---- |  to be sent  ) none for the newest token
                 first                 rows
    """

    attempt: int
    first: int = 0
    rows: int = 0
    tokens: int = 0
    served: bool = False
    """Whether it ever got an answer other than that there is no room."""


class DrafterSessions:
    """The sessions of one connection. No clock, no network, no tensor."""

    def __init__(self, limits: Connection) -> None:
        self.limits = limits
        self.closes: list[tuple[str, int]] = []
        """Sessions, as (request id, attempt), of whose end the drafter is still to be told."""
        self._table: dict[str, Session] = {}
        self._without_room: dict[str, int] = {}  # request id -> step at which it is tried again

    def get(self, request_id: str) -> Session | None:
        """The request's session."""
        return self._table.get(request_id)

    def admit(self, step: int, requests: list[Request], features: FeatureStore) -> list[tuple[Request, Session]]:
        """Those of `requests` that may draft, in order: the drafter has room for them, and all rows they need exist.

        The room is that of the oldest first. The session of a request that may not draft is closed. A new session has
        no tokens.
        """
        names = {request.request_id for request in requests}
        held = sum(self._cost(session.rows) for name, session in self._table.items() if name not in names)
        admitted = []
        for request in requests:
            session = self._current(request)
            cost = self._cost(len(request.tokens) - 1)
            fits = not self.limits.kv_tokens or held + cost <= self.limits.kv_tokens
            if session is None and fits and self._may_open(step, request):
                first = self._window_start(request)
                session = Session(request.attempt, first=first, rows=first)
            if session is None:
                continue
            if fits and (not self.limits.rows or features.has(request.pages, session.rows, len(request.tokens) - 1)):
                self._table[request.request_id] = session
                admitted.append((request, session))
                held += cost
            else:
                self.close(request.request_id)
        return admitted

    def close(self, request_id: str) -> None:
        """Ends the session, if there is one."""
        session = self._table.pop(request_id, None)
        if session is not None:
            self.closes.append((request_id, session.attempt))

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._without_room.pop(request_id, None)
        self.close(request_id)

    def rewind(self, step: int, request_id: str, have: int) -> None:
        """The drafter holds `have` tokens and the rows of all but the last of them; nothing at all if 0."""
        session = self._table.get(request_id)
        if session is None:
            return
        if have - 1 > session.first or (have and not session.first):
            session.tokens = min(session.tokens, have)
            session.rows = min(session.rows, have - 1)
        elif have:  # what it holds is of no use
            self.close(request_id)
        else:
            del self._table[request_id]
            if not session.served:  # other verifiers' sessions fill the drafter
                self._without_room[request_id] = step + _STEPS_WITHOUT_ROOM

    def _current(self, request: Request) -> Session | None:
        """The session of this attempt, unless it lags so far that none of its rows are in the window any more."""
        session = self._table.get(request.request_id)
        if session is None or session.attempt != request.attempt or session.rows < self._window_start(request):
            self.close(request.request_id)
            return None
        return session

    def _may_open(self, step: int, request: Request) -> bool:
        most = self.limits.max_sessions
        return not (most and len(self._table) >= most) and step >= self._without_room.get(request.request_id, 0)

    def _window_start(self, request: Request) -> int:
        """First position whose row a draft reads."""
        window = self.limits.window
        return max(0, len(request.tokens) - window) if window and self.limits.rows else 0

    def _cost(self, tokens: int) -> int:
        """Of the drafter's room, what a session with so many tokens of context takes."""
        return min(tokens, self.limits.window - 1) if self.limits.window else tokens
