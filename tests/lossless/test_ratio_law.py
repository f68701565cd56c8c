"""The law of rule `ratio` over several rounds, enumerated exactly; and ways to break it, each of which must show."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from services.kernels.noise_ref import ACCEPT, DRAFT, RESIDUAL, gumbel, key_tensor, noise_key
from services.verifier.acceptance import judge
from tests.support.ratio_rounds import (
    LENGTH,
    QUARTERS,
    VOCAB,
    P,
    Policy,
    Q,
    Round,
    Tokens,
    distance,
    drawn,
    last,
    play,
    target_law,
    trial,
)
from tests.support.stats import chi_square_p

EXACT, WRONG = 1e-6, 1e-3  # float32 against a bias that a law test of a million rounds would find
KINDS = ("all ids", "candidates", "one-hot")


def fixed(k: int, kind: str) -> Policy:
    def policy(tokens: Tokens, memory: Any) -> Iterator[Round]:
        for probability, draft in drawn(last(tokens), k):
            yield Round(probability, draft, k, kind)

    return policy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_fixed_k(k: int, kind: str) -> None:
    assert distance(play(fixed(k, kind)), target_law()) < EXACT


@pytest.mark.parametrize("k", [1, 3])
def test_deterministic_drafts(k: int) -> None:
    """The drafter's best guess, one-hot: a function of the text."""

    def policy(tokens: Tokens, memory: Any) -> Iterator[Round]:
        draft: list[int] = []
        for _ in range(k):
            draft.append(int(Q[last((*tokens, *draft))].argmax()))
        yield Round(1.0, tuple(draft), k, "one-hot")

    assert distance(play(policy), target_law()) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_k_from_the_tokens_before(kind: str) -> None:
    """Whether x_k is verified depends on x_1 .. x_k-1: it stops before the first that follows a 2."""

    def policy(tokens: Tokens, memory: Any) -> Iterator[Round]:
        for probability, draft in drawn(last(tokens), 3):
            path = (last(tokens), *draft)
            yield Round(probability, draft, next((k for k in range(3) if path[k] == 2), 3), kind)

    assert distance(play(policy), target_law()) < EXACT


@pytest.mark.parametrize("kind", ["all ids", "candidates"])
def test_k_from_the_token_it_judges_is_wrong(kind: str) -> None:
    """x_k verified only where it looks good: the others get a fresh draw, and mass leaks to what looks good."""

    def policy(tokens: Tokens, memory: Any) -> Iterator[Round]:
        for probability, draft in drawn(last(tokens), 3):
            path = (last(tokens), *draft)
            good = [Q[a][b] >= 0.5 for a, b in itertools.pairwise(path)]
            yield Round(probability, draft, next((k for k in range(3) if not good[k]), 3), kind)

    assert distance(play(policy), target_law()) > WRONG


def test_another_law_than_the_one_drawn_from_is_wrong() -> None:
    assert distance(play(fixed(2, "another")), target_law()) > WRONG


def next_k(memory: int, turn: Round, new: Tokens) -> int:
    """From the first token that was drafted in vain, if there is one."""
    left = turn.drafted[len(new) :]
    return (3 if left[0] in (0, 3) else 0) if left else 2


@pytest.mark.parametrize("kind", KINDS)
def test_k_from_history(kind: str) -> None:
    """Drafts have three tokens; how many are verified depends on what the last round discarded, with new noise."""

    def policy(tokens: Tokens, memory: Any) -> Iterator[Round]:
        for probability, draft in drawn(last(tokens), 3):
            yield Round(probability, draft, memory, kind)

    law = play(policy, lambda memory, turn, tokens, new: next_k(memory, turn, new), 2)
    assert distance(law, target_law()) < EXACT


@pytest.mark.parametrize(("again", "right"), [(False, True), (True, False)])
def test_k_from_history_with_noise_by_position(again: bool, right: bool) -> None:
    """The same, but a position that is drafted again has the noise that it had: then what was discarded says more."""

    def policy(tokens: Tokens, memory: Any) -> Iterator[Round]:
        k, known = memory
        free = [position for position in range(3) if len(tokens) + position not in dict(known)]
        for number in range(QUARTERS ** len(free)):
            values = [dict(known).get(len(tokens) + i, 0) for i in range(3)]
            for position in free:
                number, values[position] = divmod(number, QUARTERS)
            draft: list[int] = []
            for value in values:
                steps = Q[last((*tokens, *draft))].cumsum()
                draft.append(int(np.searchsorted(steps, (value + 0.5) / QUARTERS)))
            yield Round(QUARTERS ** -len(free), tuple(draft), k, "all ids", tuple(values))

    def remember(memory: Any, turn: Round, tokens: Tokens, new: Tokens) -> Any:
        kept = [(len(tokens) + i, turn.noise[i]) for i in range(len(new), 3)] if again else []
        return next_k(0, turn, new), tuple(kept)

    found = distance(play(policy, remember, (2, ())), target_law())
    assert found < EXACT if right else found > WRONG


@pytest.mark.parametrize(
    ("stream", "kind"), [(DRAFT, "candidates"), (DRAFT, "one-hot"), (ACCEPT, "candidates"), (RESIDUAL, "one-hot")]
)
def test_real_noise(stream: int, kind: str) -> None:
    """Drafts drawn with the stream that is theirs, and with those of the verifier: only the first gives the law."""
    count = 3000
    texts: list[Tokens] = [() for _ in range(count)]
    memory = [3] * count
    rng = random.Random(stream)
    for turn in range(LENGTH):
        live = [i for i, text in enumerate(texts) if len(text) < LENGTH]
        states = np.array([last(texts[i]) for i in live])
        drafts = np.zeros((len(live), 3), np.int64)
        for slot in range(1, 4):
            keys = key_tensor([noise_key(i, 1, turn, slot, stream) for i in live])
            scores = torch.from_numpy(Q[states]).log() + gumbel(keys, torch.arange(VOCAB, dtype=torch.int32)[None])
            states = drafts[:, slot - 1] = scores.argmax(dim=-1).numpy()
        rows, trials = [], []
        for i, draft in zip(live, drafts.tolist(), strict=True):
            mine, it = trial(last(texts[i]), tuple(draft[: memory[i]]), kind, (i, 1, turn))
            rows += mine
            trials.append(it)
        for i, draft, verdict in zip(live, drafts.tolist(), judge(torch.stack(rows), trials), strict=True):
            texts[i] += tuple(verdict)
            memory[i] = 1 + (sum(draft[len(verdict) :]) + rng.randrange(2)) % 3
    found = [chi_square_p([text[:length] for text in texts], target_law(length)) for length in (1, 2, LENGTH)]
    assert min(found) > 1e-3 if stream == DRAFT else min(found) < 1e-6, found


def test_the_world_is_worth_playing_in() -> None:
    """Laws differ, overlap and exclude; every row is one."""
    assert (P.sum(axis=1) == 1).all() and (Q.sum(axis=1) == 1).all()
    assert (np.abs(P - Q).sum(axis=1) > 0).all() and ((P > 0) & (Q > 0)).any(axis=1).all()
    assert ((P == 0) & (Q > 0)).any() and (P > Q).any(axis=1).all()
