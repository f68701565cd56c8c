"""The sessions of one Draft stream: which messages apply, which come too late, which leave a gap. No computing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from services.drafter.methods import FeatureRows, NewTokens, ProposeItem, Traits
from services.drafter.step import Commit, Stamp, Step, Wish

_keys = itertools.count(1)


class Capacity:
    """Room for sessions and for the tokens of context they hold, shared by all streams of a replica."""

    def __init__(self, sessions: int, tokens: int = 0) -> None:
        """`tokens` 0 is unlimited."""
        self._most_sessions, self._most_tokens = sessions, tokens
        self.sessions = self.tokens = 0
        """In use."""

    def take(self, sessions: int, tokens: int) -> bool:
        """Takes both; False, and nothing is taken, if there is no room."""
        if sessions and self.sessions + sessions > self._most_sessions:
            return False
        if tokens and self._most_tokens and self.tokens + tokens > self._most_tokens:
            return False
        self.sessions += sessions
        self.tokens += tokens
        return True

    def give(self, sessions: int, tokens: int) -> None:
        """Returns both."""
        self.sessions -= sessions
        self.tokens -= tokens
        assert self.sessions >= 0 and self.tokens >= 0


@dataclass(slots=True)
class Session:
    """One request's session: the method knows it by `key`; it holds `length` tokens."""

    key: int
    attempt: int
    length: int = 0
    first_row: int = 0
    rows: int = 0
    """Feature rows of the positions first_row .. rows - 1 are held; none if 0."""


@dataclass(slots=True)
class Plan:
    """What the method is to do, and what is answered without it."""

    closes: list[int] = field(default_factory=list)
    opens: list[int] = field(default_factory=list)
    news: list[NewTokens] = field(default_factory=list)
    proposes: list[tuple[Stamp, ProposeItem]] = field(default_factory=list)
    resyncs: dict[tuple[str, int], tuple[Stamp, int]] = field(default_factory=dict)
    """By request id and attempt, the latest stamp: one resync per session and step."""
    stale: int = 0
    """Messages of older attempts, ignored."""

    @property
    def tokens(self) -> int:
        """Tokens to be committed."""
        return sum(len(new.token_ids) for new in self.news)

    @property
    def rows(self) -> int:
        """Feature rows to be taken in."""
        return sum(new.rows.shape[0] for new in self.news if new.rows is not None)

    def resync(self, stamp: Stamp, have: int) -> None:
        """Answers with what is held."""
        self.resyncs[stamp.request_id, stamp.attempt] = (stamp, have)

    def forget(self, key: int) -> None:
        """The session ends within this step, of which the method then hears nothing but that."""
        self.news = [new for new in self.news if new.key != key]
        if key in self.opens:
            self.opens.remove(key)
        else:
            self.closes.append(key)


class Sessions:
    """The table of one stream."""

    def __init__(self, capacity: Capacity, traits: Traits) -> None:
        self._capacity = capacity
        self._takes_rows = bool(traits.feature_width)
        self._window = traits.window
        self._table: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._table)

    def plan(self, step: Step) -> Plan:
        """Applies one step to the table and says what the method must do, in the order of drafter.proto."""
        plan = Plan()
        for stamp in step.closes:
            self._close(stamp, plan)
        for stamp in step.opens:
            self._open(stamp, plan)
        for commit in step.commits:
            self._commit(commit, plan)
        for wish in step.wishes:
            self._propose(wish, plan)
        return plan

    def close_all(self) -> list[int]:
        """Ends every session and returns their keys."""
        sessions = list(self._table.values())
        for session in sessions:
            self._capacity.give(1, self._cost(session.rows))
        self._table.clear()
        return [session.key for session in sessions]

    def _close(self, stamp: Stamp, plan: Plan) -> None:
        session = self._table.get(stamp.request_id)
        if session is None:
            return
        if stamp.attempt < session.attempt:
            plan.stale += 1
            return
        del self._table[stamp.request_id]
        self._capacity.give(1, self._cost(session.rows))
        plan.forget(session.key)

    def _open(self, stamp: Stamp, plan: Plan) -> None:
        """Begins a session; one that is open already begins again, for its verifier wants to start over."""
        session = self._table.get(stamp.request_id)
        if session is not None and stamp.attempt < session.attempt:
            plan.stale += 1
            return
        if session is not None:
            self._close(stamp, plan)
        if not self._capacity.take(1, 0):
            return  # its commits and wishes are answered as those of an unknown session
        opened = self._table[stamp.request_id] = Session(next(_keys), stamp.attempt)
        plan.opens.append(opened.key)

    def _find(self, stamp: Stamp, plan: Plan) -> Session | None:
        """The session a message is for; None, and a resync or a count, if there is none of its attempt."""
        session = self._table.get(stamp.request_id)
        if session is None or stamp.attempt > session.attempt:
            plan.resync(stamp, 0)
            return None
        if stamp.attempt < session.attempt:
            plan.stale += 1
            return None
        return session

    def _commit(self, commit: Commit, plan: Plan) -> None:
        stamp = commit.stamp
        session = self._find(stamp, plan)
        if session is None:
            return
        known = session.length - stamp.base_length
        if known < 0:
            plan.resync(stamp, self._have(session))
            return
        # Committed tokens never change, so those sent again are skipped.
        token_ids = commit.token_ids[known:] if known else commit.token_ids
        session.length += len(token_ids)
        rows = None if commit.rows is None else self._new_rows(session, stamp, commit.rows, plan)
        if stamp.request_id in self._table and (token_ids or rows is not None):
            plan.news.append(NewTokens(session.key, token_ids, rows))

    def _new_rows(self, session: Session, stamp: Stamp, rows: FeatureRows, plan: Plan) -> FeatureRows | None:
        """What of `rows` is new and counted from now on; a gap, or no room, is answered by a resync."""
        # The newest token has no row yet. A drafter with a window may begin in the middle of the text.
        end = min(rows.base + rows.shape[0], session.length - 1)
        begin = rows.base if not session.rows and self._window else session.rows
        if rows.base > begin:
            plan.resync(stamp, self._have(session))
            return None
        if end <= begin:
            return None
        if not self._capacity.take(0, self._cost(end) - self._cost(session.rows)):
            self._close(stamp, plan)
            plan.resync(stamp, 0)
            return None
        if not session.rows:
            session.first_row = begin
        session.rows = end
        return rows.cut(begin, end)

    def _propose(self, wish: Wish, plan: Plan) -> None:
        stamp = wish.stamp
        session = self._find(stamp, plan)
        if session is None:
            return
        if stamp.base_length != session.length or self._have(session) < session.length:
            plan.resync(stamp, self._have(session))
            return
        if self._takes_rows and not session.length:
            plan.resync(stamp, 0)  # nothing to draft from
            return
        if session.first_row and session.first_row > session.length - self._window:
            plan.resync(stamp, 0)  # its rows begin behind those that a draft attends to
            return
        item = ProposeItem(session.key, wish.max_tokens, wish.sampling, stamp.attempt, stamp.round, stamp.base_length)
        plan.proposes.append((stamp, item))

    def _have(self, session: Session) -> int:
        """Tokens held whose rows, the newest token's apart, are held too."""
        return min(session.length, session.rows + 1) if self._takes_rows else session.length

    def _cost(self, rows: int) -> int:
        """Tokens of capacity that a session with rows up to there takes."""
        return min(rows, self._window - 1) if self._window else rows
