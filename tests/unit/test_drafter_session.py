"""Which messages of a Draft stream apply, which are stale, which leave a gap."""

from __future__ import annotations

import random

import pytest

from services.drafter.methods import FeatureRows, NewTokens, Traits
from services.drafter.session import Capacity, Plan, Sessions
from services.drafter.step import Commit, Stamp, Step, Wish

NGRAM = Traits(kind="ngram", max_draft_tokens=8)
WIDE = Traits(kind="wide", max_draft_tokens=8, feature_width=1)


def stamp(base: int = 0, *, name: str = "r", attempt: int = 0) -> Stamp:
    return Stamp(name, attempt, 0, base)


def opened(tokens: int = 0, *, attempt: int = 0, capacity: int = 4) -> Sessions:
    sessions = Sessions(Capacity(capacity), NGRAM)
    sessions.plan(Step(1, opens=[stamp(attempt=attempt)], commits=[Commit(stamp(attempt=attempt), [1] * tokens)]))
    return sessions


def resyncs(plan: Plan) -> list[tuple[str, int, int]]:
    return [(s.request_id, s.base_length, have) for s, have in plan.resyncs.values()]


def test_one_message_holds_a_whole_life() -> None:
    sessions = opened(3)
    step = Step(2, closes=[stamp()], opens=[stamp()], commits=[Commit(stamp(), [5, 6])], wishes=[Wish(stamp(2), 4)])
    plan = sessions.plan(step)
    assert len(plan.closes) == len(plan.opens) == 1 and plan.closes != plan.opens
    assert plan.news == [NewTokens(plan.opens[0], [5, 6])]
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
    assert resyncs(plan) == [("r", 7, 3)] and not plan.news and not plan.proposes
    plan = sessions.plan(Step(3, commits=[Commit(stamp(3), [1, 1, 1, 1])], wishes=[Wish(stamp(7), 1)]))
    assert not plan.resyncs and len(plan.proposes) == 1


def test_tokens_sent_again_are_skipped() -> None:
    sessions = opened(3)
    plan = sessions.plan(Step(2, commits=[Commit(stamp(1), [1, 1, 8, 9]), Commit(stamp(3), [8, 9])]))
    assert [new.token_ids for new in plan.news] == [[8, 9]]
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
    first, second = Sessions(capacity, NGRAM), Sessions(capacity, NGRAM)
    first.plan(Step(1, opens=[stamp(name="a"), stamp(name="b")]))
    plan = second.plan(Step(1, opens=[stamp(name="c")], wishes=[Wish(stamp(name="c"), 1)]))
    assert not plan.opens and resyncs(plan) == [("c", 0, 0)]
    first.plan(Step(2, closes=[stamp(name="a")]))
    assert len(second.plan(Step(2, opens=[stamp(name="c")])).opens) == 1
    assert len(first.close_all()) == 1 and len(second.close_all()) == 1 and capacity.sessions == 0


def test_opened_twice_in_one_step_is_one_session_for_the_method() -> None:
    sessions = Sessions(Capacity(1), NGRAM)
    plan = sessions.plan(Step(1, opens=[stamp(), stamp()], commits=[Commit(stamp(), [1])]))
    assert len(plan.opens) == len(plan.news) == 1 and not plan.closes and plan.news[0].key == plan.opens[0]


def rows(base: int, count: int) -> FeatureRows:
    """Rows that say their position, one byte each."""
    return FeatureRows(base, (count, 1), 0, bytes(range(base, base + count)))


def taken(plan: Plan) -> list[tuple[int, list[int]]]:
    return [(new.rows.base, list(new.rows.data)) for new in plan.news if new.rows is not None]


def wide(tokens: int, held: int, *, window: int = 0, room: int = 0, base: int = 0) -> Sessions:
    """A session of `tokens` tokens with the rows base .. held - 1."""
    traits = Traits(kind="wide", max_draft_tokens=8, feature_width=1, window=window)
    sessions = Sessions(Capacity(4, room), traits)
    carried = rows(base, held - base) if held > base else None
    sessions.plan(Step(1, opens=[stamp()], commits=[Commit(stamp(), [1] * tokens, carried)]))
    return sessions


def test_a_draft_needs_the_rows_of_all_tokens_but_the_newest() -> None:
    sessions = wide(5, 2)
    plan = sessions.plan(Step(2, wishes=[Wish(stamp(5), 1)]))
    assert resyncs(plan) == [("r", 5, 3)] and not plan.proposes
    plan = sessions.plan(Step(3, commits=[Commit(stamp(5), [], rows(2, 2))], wishes=[Wish(stamp(5), 1)]))
    assert not plan.resyncs and len(plan.proposes) == 1 and taken(plan) == [(2, [2, 3])]
    one = wide(1, 0)
    assert len(one.plan(Step(2, wishes=[Wish(stamp(1), 1)])).proposes) == 1  # the anchor alone has no rows
    nothing = wide(5, 0)
    assert resyncs(nothing.plan(Step(2, wishes=[Wish(stamp(5), 1)]))) == [("r", 5, 1)]


def test_rows_sent_again_and_rows_of_no_token_are_skipped() -> None:
    sessions = wide(6, 3)
    plan = sessions.plan(Step(2, commits=[Commit(stamp(6), [], rows(1, 9)), Commit(stamp(6), [], rows(0, 5))]))
    assert taken(plan) == [(3, [3, 4])] and not plan.resyncs  # 5 is the anchor's: it has none yet
    plan = sessions.plan(Step(3, commits=[Commit(stamp(6), [7], rows(5, 1))], wishes=[Wish(stamp(7), 1)]))
    assert taken(plan) == [(5, [5])] and len(plan.proposes) == 1


def test_rows_with_a_gap_ask_for_the_rest() -> None:
    sessions = wide(6, 2)
    plan = sessions.plan(Step(2, commits=[Commit(stamp(6), [9], rows(3, 3))], wishes=[Wish(stamp(7), 1)]))
    assert resyncs(plan) == [("r", 7, 3)] and not taken(plan) and not plan.proposes
    plan = sessions.plan(Step(3, commits=[Commit(stamp(3), [1, 1, 1, 9], rows(2, 4))], wishes=[Wish(stamp(7), 1)]))
    assert taken(plan) == [(2, [2, 3, 4, 5])] and len(plan.proposes) == 1


@pytest.mark.parametrize(("base", "served"), [(0, True), (5, True), (6, True), (7, False)])
def test_a_window_may_begin_in_the_middle(base: int, served: bool) -> None:
    # Anchor at 9, window 4: it attends to itself and to the rows 6, 7, 8.
    sessions = wide(10, 9, window=4, base=base)
    plan = sessions.plan(Step(2, wishes=[Wish(stamp(10), 1)]))
    assert len(plan.proposes) == served and resyncs(plan) == ([] if served else [("r", 10, 0)])


def test_without_a_window_rows_begin_at_the_beginning() -> None:
    assert resyncs(wide(10, 9, base=5).plan(Step(2, wishes=[Wish(stamp(10), 1)]))) == [("r", 10, 1)]


def test_a_session_without_room_ends() -> None:
    capacity = Capacity(4, 10)
    sessions = Sessions(capacity, WIDE)
    a, b = stamp(name="a"), stamp(name="b")
    sessions.plan(Step(1, opens=[a, b], commits=[Commit(a, [1] * 7, rows(0, 6)), Commit(b, [1] * 5, rows(0, 4))]))
    assert (capacity.sessions, capacity.tokens) == (2, 10)
    more = Commit(stamp(5, name="b"), [1, 1], rows(4, 2))
    plan = sessions.plan(Step(2, commits=[more], wishes=[Wish(stamp(7, name="b"), 1), Wish(stamp(7, name="a"), 1)]))
    assert resyncs(plan) == [("b", 7, 0)] and len(plan.closes) == 1 and not plan.news
    assert [s.request_id for s, _ in plan.proposes] == ["a"] and (capacity.sessions, capacity.tokens) == (1, 6)
    plan = sessions.plan(Step(3, opens=[b], commits=[Commit(b, [1] * 7, rows(0, 6))]))
    assert not plan.opens and not plan.closes and not plan.news and resyncs(plan) == [("b", 0, 0)]
    sessions.close_all()
    assert (capacity.sessions, capacity.tokens) == (0, 0)


def test_a_window_takes_no_more_than_itself() -> None:
    assert len(wide(40, 39, window=6, room=5).plan(Step(2, wishes=[Wish(stamp(40), 1)])).proposes) == 1
    assert not wide(40, 39, window=7, room=5).plan(Step(2, wishes=[Wish(stamp(40), 1)])).proposes


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_method_gets_every_row_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    capacity = Capacity(2, 40)
    sessions = Sessions(capacity, WIDE)
    held: dict[int, list[int]] = {}
    served = 0
    for number in range(400):
        name = rng.choice("abc")
        where = stamp(rng.choice((0, rng.randint(0, 9))), name=name)
        carried = rows(rng.choice((0, rng.randint(0, 9))), rng.randint(0, 8))
        step = Step(
            number,
            closes=[stamp(name=name)] if rng.random() < 0.05 else [],
            opens=[stamp(name=name)] if rng.random() < 0.1 else [],
            commits=[Commit(where, [1] * rng.randint(0, 6), carried)],
            wishes=[Wish(stamp(rng.randint(0, 12), name=name), 1)],
        )
        plan = sessions.plan(step)
        for key in plan.closes:
            del held[key]
        for key in plan.opens:
            held[key] = []
        for new in plan.news:
            if new.rows is not None:
                assert new.rows.base == len(held[new.key])
                held[new.key] += new.rows.data
        served += len(plan.proposes)
        for s, item in plan.proposes:
            assert len(held[item.key]) == s.base_length - 1
        assert all(values == list(range(len(values))) for values in held.values())
        assert (capacity.sessions, capacity.tokens) == (len(held), sum(map(len, held.values())))
    assert served and sorted(sessions.close_all()) == sorted(held)
