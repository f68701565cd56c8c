"""The sessions of one Draft stream: which messages apply, which come too late, which leave a gap. No computing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.methods import FeatureRows, ProposeItem
from services.drafter.step import Commit, Stamp, Step, Wish

_keys = itertools.count(1)


class Capacity:
    """Room for sessions, shared by all streams of a replica."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self) -> bool:
        """Takes one place; False if there is none."""
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def give(self) -> None:
        """Returns one place."""
        self.used -= 1
        assert self.used >= 0


@dataclass(slots=True)
class Session:
    """One request's session: the method knows it by `key`; it holds `length` tokens."""

    key: int
    attempt: int
    length: int = 0


@dataclass(slots=True)
class Plan:
    """What the method is to do, and what is answered without it."""

    closes: list[int] = field(default_factory=list)
    opens: list[int] = field(default_factory=list)
    commits: list[tuple[int, Sequence[int], FeatureRows | None]] = field(default_factory=list)
    proposes: list[tuple[Stamp, ProposeItem]] = field(default_factory=list)
    resyncs: dict[tuple[str, int], tuple[Stamp, int]] = field(default_factory=dict)
    """By request id and attempt, the latest stamp: one resync per session and step."""
    stale: int = 0
    """Messages of older attempts, ignored."""

    @property
    def tokens(self) -> int:
        """Tokens to be committed."""
        return sum(len(token_ids) for _, token_ids, _ in self.commits)


class Sessions:
    """The table of one stream."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
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
        keys = [session.key for session in self._table.values()]
        for _ in keys:
            self._capacity.give()
        self._table.clear()
        return keys

    def _close(self, stamp: Stamp, plan: Plan) -> None:
        session = self._table.get(stamp.request_id)
        if session is None:
            return
        if stamp.attempt < session.attempt:
            plan.stale += 1
            return
        del self._table[stamp.request_id]
        self._capacity.give()
        plan.closes.append(session.key)

    def _open(self, stamp: Stamp, plan: Plan) -> None:
        """Begins a session; one that is open already begins again, for its verifier wants to start over."""
        session = self._table.get(stamp.request_id)
        if session is not None and stamp.attempt < session.attempt:
            plan.stale += 1
            return
        if session is not None:
            self._close(stamp, plan)
        if not self._capacity.take():
            return  # its commits and wishes are answered as those of an unknown session
        opened = self._table[stamp.request_id] = Session(next(_keys), stamp.attempt)
        plan.opens.append(opened.key)

    def _find(self, stamp: Stamp, plan: Plan) -> Session | None:
        """The session a message is for; None, and a resync or a count, if there is none of its attempt."""
        session = self._table.get(stamp.request_id)
        if session is None or stamp.attempt > session.attempt:
            plan.resyncs[stamp.request_id, stamp.attempt] = (stamp, 0)
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
            plan.resyncs[stamp.request_id, stamp.attempt] = (stamp, session.length)
            return
        # Committed tokens never change, so those sent again are skipped.
        token_ids = commit.token_ids[known:] if known else commit.token_ids
        session.length += len(token_ids)
        if token_ids or commit.rows is not None:
            plan.commits.append((session.key, token_ids, commit.rows))

    def _propose(self, wish: Wish, plan: Plan) -> None:
        stamp = wish.stamp
        session = self._find(stamp, plan)
        if session is None:
            return
        if stamp.base_length != session.length:
            plan.resyncs[stamp.request_id, stamp.attempt] = (stamp, session.length)
            return
        item = ProposeItem(session.key, wish.max_tokens, wish.temperature, wish.seed)
        plan.proposes.append((stamp, item))
