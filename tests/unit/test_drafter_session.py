"""Which messages of a Draft stream apply, which are stale, which leave a gap."""

from __future__ import annotations

from services.drafter.session import Capacity, Plan, Sessions
from services.drafter.step import Commit, Stamp, Step, Wish


def stamp(base: int = 0, *, name: str = "r", attempt: int = 0) -> Stamp:
    return Stamp(name, attempt, 0, base)


def opened(tokens: int = 0, *, attempt: int = 0, capacity: int = 4) -> Sessions:
    sessions = Sessions(Capacity(capacity))
    sessions.plan(Step(1, opens=[stamp(attempt=attempt)], commits=[Commit(stamp(attempt=attempt), [1] * tokens)]))
    return sessions


def resyncs(plan: Plan) -> list[tuple[str, int, int]]:
    return [(s.request_id, s.base_length, have) for s, have in plan.resyncs.values()]


def test_one_message_holds_a_whole_life() -> None:
    sessions = opened(3)
    step = Step(2, closes=[stamp()], opens=[stamp()], commits=[Commit(stamp(), [5, 6])], wishes=[Wish(stamp(2), 4)])
    plan = sessions.plan(step)
    assert len(plan.closes) == len(plan.opens) == 1 and plan.closes != plan.opens
    assert plan.commits == [(plan.opens[0], [5, 6], None)]
    assert [(item.key, item.max_tokens) for _, item in plan.proposes] == [(plan.opens[0], 4)]
    assert not plan.resyncs and len(sessions) == 1


def test_unknown_sessions_hold_nothing() -> None:
    sessions = opened(3)
    plan = sessions.plan(Step(2, closes=[stamp(name="x")], commits=[Commit(stamp(9, name="x"), [1])]))
    assert resyncs(plan) == [("x", 9, 0)]
    plan = sessions.plan(Step(2, commits=[Commit(stamp(9, name="x"), [1])], wishes=[Wish(stamp(10, name="x"), 1)]))
    assert resyncs(plan) == [("x", 10, 0)]  # one per session, the latest stamp
    plan = sessions.plan(Step(2, wishes=[Wish(stamp(3, attempt=1), 1)]))
    assert resyncs(plan) == [("r", 3, 0)]  # known, but not this attempt


def test_gap_asks_for_the_rest() -> None:
    sessions = opened(3)
    plan = sessions.plan(Step(2, commits=[Commit(stamp(5), [1, 1])], wishes=[Wish(stamp(7), 1)]))
    assert resyncs(plan) == [("r", 7, 3)] and not plan.commits and not plan.proposes
    plan = sessions.plan(Step(3, commits=[Commit(stamp(3), [1, 1, 1, 1])], wishes=[Wish(stamp(7), 1)]))
    assert not plan.resyncs and len(plan.proposes) == 1


def test_tokens_sent_again_are_skipped() -> None:
    sessions = opened(3)
    plan = sessions.plan(Step(2, commits=[Commit(stamp(1), [1, 1, 8, 9]), Commit(stamp(3), [8, 9])]))
    assert [token_ids for _, token_ids, _ in plan.commits] == [[8, 9]]
    assert not sessions.plan(Step(3, wishes=[Wish(stamp(5), 1)])).resyncs


def test_older_attempts_are_ignored_and_counted() -> None:
    sessions = opened(3, attempt=2)
    old = stamp(3, attempt=1)
    plan = sessions.plan(Step(2, closes=[old], opens=[old], commits=[Commit(old, [1])], wishes=[Wish(old, 1)]))
    assert plan == Plan(stale=4) and len(sessions) == 1
    assert len(sessions.plan(Step(3, wishes=[Wish(stamp(3, attempt=2), 1)])).proposes) == 1


def test_newer_attempt_replaces() -> None:
    capacity = 1
    sessions = opened(3, capacity=capacity)
    new = stamp(attempt=1)
    plan = sessions.plan(Step(2, opens=[new], commits=[Commit(new, [1])], wishes=[Wish(stamp(1, attempt=1), 1)]))
    assert len(plan.closes) == 1 and len(plan.proposes) == 1 and len(sessions) == 1


def test_opening_again_starts_over() -> None:
    sessions = opened(3)
    plan = sessions.plan(Step(2, opens=[stamp()], wishes=[Wish(stamp(3), 1)]))
    assert resyncs(plan) == [("r", 3, 0)] and len(sessions) == 1


def test_capacity_is_shared_and_given_back() -> None:
    capacity = Capacity(2)
    first, second = Sessions(capacity), Sessions(capacity)
    first.plan(Step(1, opens=[stamp(name="a"), stamp(name="b")]))
    plan = second.plan(Step(1, opens=[stamp(name="c")], wishes=[Wish(stamp(name="c"), 1)]))
    assert not plan.opens and resyncs(plan) == [("c", 0, 0)]
    first.plan(Step(2, closes=[stamp(name="a")]))
    assert len(second.plan(Step(2, opens=[stamp(name="c")])).opens) == 1
    assert len(first.close_all()) == 1 and len(second.close_all()) == 1 and capacity.used == 0
