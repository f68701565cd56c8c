"""Rule `match`: exactly the tokens of decoding one by one; and what rule `ratio` does at its edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from services.model.probs import RowLaw, draw
from services.verifier.acceptance import Trial, judge, match
from services.verifier.draft import Draft, SparseLaw


@pytest.mark.parametrize(
    ("draft", "chosen", "accepted"),
    [
        ([], [5], 0),
        ([5], [5, 6], 1),
        ([4], [5, 6], 0),
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 9, 7], [5, 6, 7, 8], 1),  # what follows a rejection is void, equal or not
        ([9, 6, 7], [5, 6, 7, 8], 0),
        ([5, 5], [5, 5, 5], 2),
    ],
)
def test_match(draft: list[int], chosen: list[int], accepted: int) -> None:
    assert match(draft, chosen) == accepted


def test_match_wants_one_row_more_than_the_draft() -> None:
    with pytest.raises(AssertionError):
        match([1, 2], [1, 2])


def test_match_is_plain_decoding() -> None:
    """Against decoding one by one with a target that is a function of the prefix, over every draft of two letters."""

    def target(prefix: tuple[int, ...]) -> int:
        return hash((prefix, 3)) % 2

    for start, draft in itertools.product(itertools.product((0, 1), repeat=2), itertools.product((0, 1), repeat=4)):
        plain = list(start)
        for _ in range(5):
            plain.append(target(tuple(plain)))
        chosen = [target((*start, *draft[:k])) for k in range(5)]
        accepted = match(draft, chosen)
        assert [*start, *chosen[: accepted + 1]] == plain[: len(start) + accepted + 1]


SEEDS = range(200)
LAW = RowLaw(1.0, 0, 1.0, 0, 0)


def ratio(p: list[list[float]], draft: list[int], q: list[dict[int, float]] | None = None) -> set[tuple[int, ...]]:
    """Every verdict that some noise gives, for rows of probabilities `p`."""
    law = None
    if q is not None:
        rows = [list(each.items()) for each in q]
        law = SparseLaw(
            np.array([[token for token, _ in row] for row in rows], np.int32),
            np.array([[value for _, value in row] for row in rows], np.float32),
        )
    trials = [Trial(Draft(draft, law), [LAW] * len(p), (seed, 0, 0)) for seed in SEEDS]
    return {tuple(tokens) for tokens in judge(torch.tensor(p).log().repeat(len(SEEDS), 1), trials)}


def test_what_the_target_excludes_never_stands() -> None:
    p = [[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]
    assert ratio(p, [0]) == {(1,), (2,)}
    assert ratio(p, [0], [{0: 0.9, 1: 0.1}]) == {(1,), (2,)}


def test_what_the_target_is_sure_of_always_stands() -> None:
    sure = [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert ratio(sure, [1, 2]) == {(1, 2, 0)}
    assert ratio(sure, [1, 2], [{1: 0.1, 0: 0.9}, {2: 1.0, 0: 0.0}]) == {(1, 2, 0)}


def test_a_draft_from_the_targets_own_law_always_stands() -> None:
    p = [0.2, 0.3, 0.5]
    for token in range(3):
        assert ratio([p, [0.0, 1.0, 0.0]], [token], [dict(enumerate(p))]) == {(token, 1)}


def test_the_token_in_its_place_is_one_that_was_drafted_too_seldom() -> None:
    p = [[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]
    assert ratio(p, [0], [{0: 0.5, 1: 0.25, 2: 0.25}]) == {(0, 0), (3,)}
    assert ratio(p, [0]) == {(0, 0), (1,), (2,), (3,)}


def test_nothing_left_but_rounding_falls_back_to_the_target() -> None:
    """A law that says more than 1: p - q is nowhere above 0, yet the token is refused."""
    assert ratio([[0.5, 0.5], [1.0, 0.0]], [0], [{0: 0.9, 1: 0.9}]) == {(0, 0), (0,), (1,)}


def test_what_follows_a_refusal_is_void() -> None:
    p = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert ratio(p, [1, 1]) == {(0,)}


def test_trials_of_all_kinds_at_once() -> None:
    """Each as if alone: prompts without rows, both rules, laws of different widths, no draft."""
    generator = torch.Generator().manual_seed(1)
    wide = SparseLaw(np.array([[3, 1, 4], [2, 0, 1]], np.int32), np.array([[0.5, 0.25, 0.25]] * 2, np.float32))
    narrow = SparseLaw(np.array([[2]], np.int32), np.ones((1, 1), np.float32))
    drafts = [Draft([]), Draft([3, 2], wide), Draft([2], narrow), Draft([1, 1, 1]), Draft([])]
    trials = [
        Trial(draft, [RowLaw(0.9, top_k, 1.0, seed, i) for i in range(len(draft) + 1)], noise)
        for seed in range(30)
        for draft in drafts
        for top_k, noise in ((0, None), (4, (seed, 1, 2)), (0, (seed, 1, 3)))
    ]
    trials.insert(7, Trial(Draft([]), [], (1, 1, 1)))
    trials.insert(0, Trial(Draft([]), []))
    logits = torch.randn(sum(len(trial.laws) for trial in trials), 6, generator=generator)
    found = judge(logits, trials)
    assert found[0] == found[8] == []
    row = 0
    for trial, tokens in zip(trials, found, strict=True):
        mine = logits[row : row + len(trial.laws)]
        row += len(trial.laws)
        if trial.laws:
            assert judge(mine, [trial]) == [tokens] and 1 <= len(tokens) <= len(trial.laws)
            assert tokens[:-1] == trial.draft.token_ids[: len(tokens) - 1]
        if trial.noise is None and trial.laws:
            chosen = draw(mine, trial.laws)
            assert tokens == chosen[: match(trial.draft.token_ids, chosen) + 1]
    assert {len(tokens) for tokens in found} >= {0, 1, 2, 3}
