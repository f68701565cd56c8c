"""Asks the drafter for this step's drafts and waits no longer than they can gain; a missing draft means K = 0."""

from __future__ import annotations

import logging
import queue
import time
from dataclasses import dataclass

from kadence.errors import InvalidRequestError
from kadence.internal import drafter_pb2
from services.model.projection import ProjectionWeights
from services.verifier import messages
from services.verifier.draft import Draft
from services.verifier.drafter_link import Connection, DrafterLink
from services.verifier.drafter_sessions import DrafterSessions, Session
from services.verifier.features import FeatureStore, RowSlice
from services.verifier.request import Request

_MISSES_TO_SUSPEND = 2
_ROWS_PER_MISS = 128  # rows that a drafter takes in within any deadline; it may be later by as many as it was sent
_ROW_BYTES_PER_MESSAGE = 4 * 2**20

_log = logging.getLogger(__name__)


@dataclass
class DraftingCounters:
    """Totals since start."""

    asked: int = 0
    late: int = 0
    stale: int = 0
    resyncs: int = 0
    lost: int = 0
    rows: int = 0
    """Feature rows sent."""
    ask_seconds: float = 0.0
    """Spent on making messages."""
    wait_seconds: float = 0.0


class Drafting:
    """The engine's view of the drafter. Everything here runs in the engine's thread."""

    def __init__(self, link: DrafterLink, vocab_size: int) -> None:
        self._link = link
        self._vocab_size = vocab_size
        self._sessions: DrafterSessions | None = None  # those of the newest connection that was asked
        self._projection: ProjectionWeights | None = None
        self._asked: dict[str, tuple[Request, int]] = {}
        self._step = 0
        self._misses = 0
        self._rows_since_answer = 0
        self.counters = DraftingCounters()

    @property
    def projection(self) -> ProjectionWeights | None:
        """What makes the feature rows that the drafter reads; the last one's while there is no drafter, so that none
        is missing when it comes back.
        """
        connection = self._link.connection
        if connection is not None:
            self._projection = connection.projection
        return self._projection

    def ask(self, step: int, wants: list[tuple[Request, int]], features: FeatureStore) -> None:
        """Sends new tokens and rows of each (request, most tokens wanted), and a propose for those that have all."""
        self._asked = {}
        connection = self._link.connection
        if connection is not None and wants:
            start = time.monotonic()
            self._ask(connection, step, wants, features)
            self.counters.ask_seconds += time.monotonic() - start

    def _ask(self, connection: Connection, step: int, wants: list[tuple[Request, int]], features: FeatureStore) -> None:
        if connection.rows and connection.rows != features.fingerprint:
            return  # it connected a moment ago; rows for it are made from the next step on
        if self._sessions is None or self._sessions.limits.generation != connection.generation:
            self._sessions = DrafterSessions(connection)
        most = {request.request_id: count for request, count in wants}
        admitted = self._sessions.admit(step, [request for request, _ in wants], features)
        message = messages.DraftRequestBuilder(step)
        self._tell_closes(message)
        rows = _rows_to_send(admitted, connection, features)
        for request, session in admitted:
            if not session.tokens:
                message.open(request)
            new = rows.get(request.request_id)
            if session.tokens < len(request.tokens) or new is not None:
                message.commit(request, session.tokens, new)
            session.tokens = len(request.tokens)
            if new is not None:
                session.rows += new.count
                self.counters.rows += new.count
                self._rows_since_answer += new.count
            if not connection.rows or session.rows == len(request.tokens) - 1:
                count = min(most[request.request_id], connection.max_draft_tokens or most[request.request_id])
                message.propose(request, count)
                self._asked[request.request_id] = (request, count)
        if self._asked:
            self._step = step
            self.counters.asked += 1
        if not message.empty:
            self._link.send(message.request, connection.generation)

    def collect(self, deadline: float) -> dict[str, Draft]:
        """Drafts by request id, waiting at most `deadline` seconds; requests without one are absent."""
        if not self._asked:
            return {}
        start = time.monotonic()
        response = self._await_step(start + deadline)
        self.counters.wait_seconds += time.monotonic() - start
        if response is None:
            return {}
        self._misses = self._rows_since_answer = 0
        self.counters.resyncs += len(response.resyncs)
        for resync in response.resyncs:
            if self._sessions is not None:
                self._sessions.rewind(self._step, resync.stamp.request_id, resync.have)
        return dict(filter(None, (self._accept(draft) for draft in response.drafts)))

    def forget(self, request: Request) -> None:
        """The request ended; its session is closed with the next message."""
        if self._sessions is not None:
            self._sessions.forget(request.request_id)

    def flush(self) -> None:
        """Sends what waits for a next step; called when there is none in sight."""
        connection, sessions = self._link.connection, self._sessions
        if connection is not None and sessions is not None and sessions.limits.generation == connection.generation:
            message = messages.DraftRequestBuilder(0)
            self._tell_closes(message)
            if not message.empty:
                self._link.send(message.request, connection.generation)

    def _tell_closes(self, message: messages.DraftRequestBuilder) -> None:
        assert self._sessions is not None
        for request_id, attempt in self._sessions.closes:
            message.close(request_id, attempt)
        self._sessions.closes.clear()

    def _await_step(self, until: float) -> drafter_pb2.DraftResponse | None:
        while True:
            try:
                response = self._link.replies.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._missed()
                return None
            if response is None:  # a connection was lost, perhaps an earlier one
                connection, sessions = self._link.connection, self._sessions
                if connection is None or sessions is None or connection.generation != sessions.limits.generation:
                    self.counters.lost += 1
                    return None
            elif response.step == self._step:
                return response
            else:
                self.counters.stale += len(response.drafts)

    def _missed(self) -> None:
        self.counters.late += 1
        self._misses += 1
        if self._misses >= _MISSES_TO_SUSPEND + self._rows_since_answer // _ROWS_PER_MISS:
            connection = self._link.connection
            if connection is not None:
                _log.warning("drafter %s is too slow: %d answers in a row late", connection.replica_id, self._misses)
            self._misses = self._rows_since_answer = 0
            self._link.suspend()

    def _accept(self, message: drafter_pb2.Draft) -> tuple[str, Draft] | None:
        """The draft if it is for a request of this step as it stands now, and makes sense."""
        request, most = self._asked.get(message.stamp.request_id, (None, 0))
        if request is None or self._sessions is None or messages.stamp_of(request) != message.stamp:
            self.counters.stale += 1
            return None
        try:
            draft = messages.draft_from(message, self._vocab_size, len(self._sessions.limits.signals))
        except InvalidRequestError as error:
            _log.debug("a draft makes no sense: %s", error)
            self.counters.stale += 1
            return None
        session = self._sessions.get(request.request_id)
        if session is not None:
            session.served = True
        return request.request_id, draft.first(most)


def _rows_to_send(
    admitted: list[tuple[Request, Session]], connection: Connection, features: FeatureStore
) -> dict[str, RowSlice]:
    """By request id, the rows that the next message carries.

    Those that lack least come first: a long text that is sent again takes what the others leave.
    """
    if not connection.rows:
        return {}
    most = min(
        _ROW_BYTES_PER_MESSAGE, connection.max_message_bytes // 2 or _ROW_BYTES_PER_MESSAGE
    )  # ids come with them
    room = most // features.row_bytes
    room = max(1, min(room, connection.max_rows or room))
    names, spans = [], []
    for request, session in sorted(admitted, key=lambda it: len(it[0].tokens) - it[1].rows):
        last = min(len(request.tokens) - 1, session.rows + room)
        if last > session.rows:
            names.append(request.request_id)
            spans.append((request.pages, session.rows, last))
            room -= last - session.rows
    return dict(zip(names, features.read(spans), strict=True))
