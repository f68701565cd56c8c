"""The engine's side of drafting: what the drafter is told, which answers count, and when it is given up."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2
from kadence.internal import drafter_pb2 as pb
from kadence.v1 import types_pb2
from services.verifier import messages
from services.verifier.draft import Draft
from services.verifier.drafter_link import DrafterLink, Side
from services.verifier.drafting import Drafting
from services.verifier.features import FeatureStore
from services.verifier.paged_kv import PagePool
from services.verifier.request import Request
from tests.support.engine_harness import request
from tests.support.rows_drafter import projection
from tests.support.scripted_drafter import ScriptedDrafter

VOCAB = 100


class Silent(ScriptedDrafter):
    """Keeps its answers for the test to deliver."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(lambda name, tokens, most: [len(tokens)] * most, **limits)
        self.held: list[pb.DraftResponse] = []

    def answer(self, response: pb.DraftResponse) -> None:
        self.held.append(response)


class Scene:
    """A Drafting and its drafter; `talk` is one step."""

    def __init__(self, drafter: ScriptedDrafter | None = None, **limits: Any) -> None:
        self.drafter = drafter or ScriptedDrafter(lambda name, tokens, most: [len(tokens)] * most, **limits)
        self.drafting = Drafting(self.drafter, VOCAB)  # type: ignore[arg-type]
        self.features = FeatureStore(PagePool(128, 4), torch.float32)
        self.step = 0

    def talk(self, *wants: tuple[Request, int], deadline: float = 1.0) -> dict[str, list[int]]:
        self.ask(*wants)
        return {name: draft.token_ids for name, draft in self.drafting.collect(deadline).items()}

    def ask(self, *wants: tuple[Request, int]) -> None:
        self.step += 1
        self.drafting.ask(self.step, list(wants), self.features)

    @property
    def last(self) -> pb.DraftRequest:
        return self.drafter.requests[-1]


def test_tells_each_token_once() -> None:
    scene, a = Scene(), request("a", [5, 6, 7], 50, temperature=0.5, seed=9)
    assert scene.talk((a, 3)) == {"a": [3, 3, 3]}
    assert [o.stamp.request_id for o in scene.last.opens] == ["a"]
    assert list(scene.last.commits[0].token_ids) == [5, 6, 7] and scene.last.commits[0].stamp.base_length == 0
    wish = scene.last.proposes[0]
    assert (wish.max_tokens, wish.sampling.seed, wish.sampling.temperature) == (3, 9, 0.5)
    a.append([8, 9])
    a.round += 1
    assert scene.talk((a, 2)) == {"a": [5, 5]}
    assert not scene.last.opens and [list(c.token_ids) for c in scene.last.commits] == [[8, 9]]
    assert scene.last.commits[0].stamp.base_length == 3
    assert scene.last.proposes[0].stamp == common_pb2.Stamp(request_id="a", round=1, base_length=5)
    assert scene.drafter.sessions == {"a": [5, 6, 7, 8, 9]}


def test_a_request_that_skips_steps_is_caught_up() -> None:
    scene, a, b = Scene(), request("a", [1], 50), request("b", [2], 50)
    scene.talk((a, 1), (b, 1))
    a.append([3])
    a.append([4])
    scene.talk((b, 1))
    assert [c.stamp.request_id for c in scene.last.commits] == []
    assert scene.talk((a, 1), (b, 1)) == {"a": [3], "b": [1]}


def test_nobody_to_ask_or_nothing_wanted_sends_nothing() -> None:
    scene, a = Scene(), request("a", [1], 50)
    assert scene.talk() == {} and not scene.drafter.requests
    scene.drafter.connection = None
    assert scene.talk((a, 3)) == {} and not scene.drafter.requests
    assert scene.drafting.counters.asked == 0


def test_limits_of_the_drafter_are_obeyed() -> None:
    scene = Scene(max_sessions=2, max_draft_tokens=4)
    a, b, c = (request(name, [1], 50) for name in "abc")
    assert scene.talk((a, 9), (b, 2), (c, 2)) == {"a": [1] * 4, "b": [1] * 2}
    assert len(scene.last.opens) == 2 and scene.last.proposes[0].max_tokens == 4
    scene.drafting.forget(a)
    assert scene.talk((b, 2), (c, 2)) == {"b": [1, 1], "c": [1, 1]}
    assert [x.stamp.request_id for x in scene.last.closes] == ["a"] and sorted(scene.drafter.sessions) == ["b", "c"]


def test_sessions_are_closed_with_the_next_message_or_when_idle() -> None:
    scene, a, b = Scene(), request("a", [1], 50), request("b", [1], 50)
    scene.talk((a, 1), (b, 1))
    scene.drafting.forget(a)
    scene.drafting.forget(request("never asked", [1], 50))
    assert len(scene.drafter.requests) == 1
    scene.drafting.flush()
    assert sorted(scene.drafter.sessions) == ["b"] and scene.last.step == 0
    scene.drafting.flush()
    assert len(scene.drafter.requests) == 2


def test_resyncs_are_served() -> None:
    """Part of a session lost, then all of it."""
    scene, a = Scene(), request("a", [1, 2, 3, 4], 50)
    scene.talk((a, 1))
    del scene.drafter.sessions["a"][2:]
    assert scene.talk((a, 1)) == {} and scene.drafting.counters.resyncs == 1
    assert scene.talk((a, 1)) == {"a": [4]} and list(scene.last.commits[0].token_ids) == [3, 4]
    del scene.drafter.sessions["a"]
    assert scene.talk((a, 1)) == {}
    assert scene.talk((a, 1)) == {"a": [4]} and len(scene.last.opens) == 1
    assert scene.drafter.sessions == {"a": [1, 2, 3, 4]}


def test_a_new_connection_is_told_everything_again() -> None:
    scene, a, b = Scene(), request("a", [1, 2], 50), request("b", [1], 50)
    scene.talk((a, 1), (b, 1))
    scene.drafter.lose()
    assert scene.talk((a, 1)) == {}
    scene.drafting.forget(b)  # the new drafter never heard of it
    scene.drafter.reconnect()
    assert scene.talk((a, 1)) == {"a": [2]} and not scene.last.closes
    assert scene.drafter.sessions == {"a": [1, 2]}


def test_connection_lost_while_waiting() -> None:
    scene = Scene(Silent())
    scene.ask((request("a", [1], 50), 1))
    scene.drafter.lose()
    start = time.monotonic()
    assert scene.drafting.collect(5.0) == {} and time.monotonic() - start < 1
    counters = scene.drafting.counters
    assert (counters.lost, counters.late) == (1, 0) and scene.drafter.suspensions == 0


def test_a_loss_of_an_earlier_connection_does_not_matter() -> None:
    scene, a = Scene(), request("a", [1], 50)
    scene.drafter.lose()
    scene.drafter.reconnect()
    assert scene.talk((a, 1)) == {"a": [1]} and scene.drafting.counters.lost == 0


def test_two_misses_in_a_row_suspend(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Silent()
    scene, a = Scene(drafter), request("a", [1], 50)
    start = time.monotonic()
    assert scene.talk((a, 1), deadline=0.05) == {}
    assert 0.04 < time.monotonic() - start < 1 and drafter.suspensions == 0
    # An answer in time forgives.
    scene.ask((a, 1))
    drafter.replies.put(drafter.held[-1])
    assert scene.drafting.collect(1) == {"a": Draft([1])}
    assert scene.talk((a, 1), deadline=0.01) == {} and drafter.suspensions == 0
    assert not caplog.messages
    name = scene.drafter.connection.replica_id if scene.drafter.connection else ""
    assert scene.talk((a, 1), deadline=0.01) == {} and drafter.suspensions == 1
    assert name and caplog.messages == [f"drafter {name} is too slow: 2 answers in a row late"]
    assert scene.drafting.counters.late == 3
    assert scene.talk((a, 1), deadline=0.01) == {} and scene.drafting.counters.asked == 4


def test_late_answers_are_dropped() -> None:
    """An answer to an earlier step is not taken for this one's, though its stamp still fits."""
    drafter = Silent()
    scene, a = Scene(drafter), request("a", [1], 50)
    assert scene.talk((a, 1), deadline=0.01) == {}
    scene.ask((a, 2))
    for response in drafter.held:
        drafter.replies.put(response)
    assert scene.drafting.collect(1) == {"a": Draft([1, 1])} and scene.drafting.counters.stale == 1


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "b"},
        {"attempt": 1},
        {"round": 1},
        {"base_length": 2},
        {"base_length": 0},
    ],
)
def test_drafts_of_another_moment_are_dropped(change: dict[str, Any]) -> None:
    drafter = Silent()
    scene = Scene(drafter)
    scene.ask((request("a", [1], 50), 1))
    for field, value in change.items():
        setattr(drafter.held[0].drafts[0].stamp, field, value)
    drafter.replies.put(drafter.held[0])
    assert scene.drafting.collect(1) == {} and scene.drafting.counters.stale == 1


@pytest.mark.parametrize(
    ("tokens", "taken"),
    [([1, 2, 3], [1, 2, 3]), ([1, 2, 3, 4, 5], [1, 2, 3]), ([], []), ([1, VOCAB], None), ([-1], None), ([1], [1])],
)
def test_drafts_that_make_no_sense(tokens: list[int], taken: list[int] | None) -> None:
    scene = Scene(ScriptedDrafter(lambda *_: tokens))
    assert scene.talk((request("a", [1], 50), 3)) == ({} if taken is None else {"a": taken})


def test_a_newer_attempt_is_another_session() -> None:
    scene, a = Scene(), request("a", [1, 2], 50)
    scene.talk((a, 1))
    scene.drafting.forget(a)
    newer = request("a", [1, 2], 50, attempt=1, committed=[3])
    assert scene.talk((newer, 1)) == {"a": [3]}
    assert scene.last.opens[0].stamp.attempt == 1 and scene.drafter.sessions == {"a": [1, 2, 3]}


def law(ids: list[list[int]], q: list[list[float]]) -> pb.SparseLaw:
    """As a drafter sends it."""

    def tensor(values: list[Any], kind: str, dtype: common_pb2.Dtype) -> common_pb2.Tensor:
        it = np.array(values, kind)
        return common_pb2.Tensor(dtype=dtype, shape=it.shape, data=it.tobytes())

    return pb.SparseLaw(
        token_ids=tensor(ids, "<i4", common_pb2.DTYPE_INT32),
        probabilities=tensor(q, "<f4", common_pb2.DTYPE_FLOAT32),
    )


IDS, Q = [[4, 9, 2], [7, 5, 0]], [[0.25, 0.75, 0.0], [0.125, 0.375, 0.5]]


def test_q_and_signals_come_with_the_tokens() -> None:
    signals = np.arange(4, dtype="<f4").reshape(2, 2)
    message = pb.Draft(token_ids=[9, 0], q=law(IDS, Q))
    message.signals.dtype, message.signals.data = common_pb2.DTYPE_FLOAT32, signals.tobytes()
    message.signals.shape.extend((2, 2))
    draft = messages.draft_from(message, VOCAB, 2)
    assert draft.q is not None and draft.q.ids.tolist() == IDS and draft.q.probabilities.tolist() == Q
    assert draft.token_ids == [9, 0] and draft.signals is not None and draft.signals.tolist() == signals.tolist()
    first = draft.first(1)
    assert first.q is not None and first.signals is not None
    assert (first.token_ids, first.q.ids.tolist(), first.signals.tolist()) == ([9], IDS[:1], [[0, 1]])
    for wrong in (1, 3):
        with pytest.raises(InvalidRequestError, match="signals"):
            messages.draft_from(message, VOCAB, wrong)
    message.signals.data = np.array([[0, 1], [2, np.nan]], "<f4").tobytes()
    with pytest.raises(InvalidRequestError, match="signals"):
        messages.draft_from(message, VOCAB, 2)
    assert messages.draft_from(pb.Draft(token_ids=[9]), VOCAB, 2) == Draft([9])


@pytest.mark.parametrize(
    ("tokens", "q"),
    [
        ([9], law(IDS, Q)),
        ([9, 0, 1], law(IDS, Q)),
        ([2, 0], law(IDS, Q)),  # drawn with probability 0
        ([9, 1], law(IDS, Q)),  # no candidate
        ([9, 0], law(IDS, [[0.25, 0.75, 0.0], [0.125, 0.375, 0.49]])),
        ([9, 0], law(IDS, [[0.5, 0.75, -0.25], Q[1]])),
        ([9, 0], law(IDS, [[0.25, np.nan, 0.0], Q[1]])),
        ([9, 0], law(IDS, [[0.25, np.inf, 0.0], Q[1]])),
        ([9, 0], law([[4, 9, VOCAB], IDS[1]], Q)),
        ([9, 0], law([[4, 9, -1], IDS[1]], Q)),
        ([9, 0], law([[4, 9, 9], IDS[1]], Q)),
        ([9, 0], law(IDS, [row[:2] for row in Q])),
        ([9, 0], law([[], []], [[], []])),
        ([9, 0], pb.SparseLaw(token_ids=law(IDS, Q).probabilities, probabilities=law(IDS, Q).probabilities)),
        ([9, 0], pb.SparseLaw()),
    ],
)
def test_a_law_that_makes_no_sense(tokens: list[int], q: pb.SparseLaw) -> None:
    """The draft does not count, and no one falls."""
    with pytest.raises(InvalidRequestError):
        messages.draft_from(pb.Draft(token_ids=tokens, q=q), VOCAB, 0)
    drafter = Silent()
    scene = Scene(drafter)
    scene.ask((request("a", [1], 50), 3))
    del drafter.held[0].drafts[0].token_ids[:]
    drafter.held[0].drafts[0].token_ids.extend(tokens)
    drafter.held[0].drafts[0].q.CopyFrom(q)
    drafter.replies.put(drafter.held[0])
    assert scene.drafting.collect(1) == {} and scene.drafting.counters.stale == 1


def test_a_drafter_may_be_late_by_the_rows_it_was_sent() -> None:
    """Two misses and one for every 128 rows; an answer in time ends the patience."""
    drafter = Silent()
    scene, a = Scene(drafter), request("a", [1] * 301, 500)
    assert drafter.connection is not None
    weights = projection()
    drafter.connection = replace(drafter.connection, rows=weights.fingerprint, projection=weights)
    scene.features.use(scene.drafting.projection)
    pool = scene.features._pool
    a.pages = pool.open()
    assert pool.reserve(a.pages, 300)
    pool.commit(a.pages, 300, weights.fingerprint)
    for misses in range(1, 5):
        assert drafter.suspensions == 0
        assert scene.talk((a, 1), deadline=0.01) == {} and scene.drafting.counters.late == misses
    assert drafter.suspensions == 1 and scene.drafting.counters.rows == 300


def test_what_the_draft_is_drawn_with_is_told() -> None:
    scene = Scene()
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 2**63,
        "rule": "ratio",
    }
    scene.talk((request("a", [1], 50, **options), 3))
    told = scene.last.proposes[0].sampling
    assert {name: getattr(told, name) for name in options} == {**options, "rule": types_pb2.RULE_RATIO}


class Full(ScriptedDrafter):
    """Has no room for another session while `full`, as when other verifiers' sessions fill it."""

    full = True

    def send(self, request: pb.DraftRequest, generation: int) -> None:
        if self.full:
            del request.opens[:]
        super().send(request, generation)


def test_a_full_drafter_is_not_sent_the_whole_text_in_every_step() -> None:
    scene = Scene(drafter := Full(lambda name, tokens, most: [len(tokens)] * most))
    a = request("a", [1] * 50, 500)
    for _ in range(200):
        assert scene.talk((a, 3)) == {}
    assert [len(commit.token_ids) for message in drafter.requests for commit in message.commits] == [50]
    drafter.full = False
    assert any(scene.talk((a, 3)) for _ in range(200))  # tried again by and by


async def test_what_was_meant_for_an_earlier_connection_is_not_sent() -> None:
    link = DrafterLink(lambda: Side(common_pb2.Description(), 4, 64), 1.0, lambda: None)
    link._loop, link._generation = asyncio.get_running_loop(), 2
    link.send(pb.DraftRequest(step=1), 1)
    link.send(pb.DraftRequest(step=2), 2)
    await asyncio.sleep(0)
    assert [(await link._outbox.get()).step, link._outbox.empty()] == [2, True]
