"""Exact laws of several rounds under rule `ratio`: the verifier's own code, with all its noise enumerated.

A tiny Markov world: what target and drafter say depends on the last token only, in quarters, so that four equally
likely values are all the noise that a draft or an acceptance needs.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from services.model.probs import RowLaw
from services.verifier import acceptance
from services.verifier.acceptance import Trial, judge
from services.verifier.draft import Draft, SparseLaw

VOCAB, LENGTH, QUARTERS = 4, 4, 4
START = VOCAB
"""Stands for the last token of the prompt."""
P = np.array([[1, 1, 1, 1], [0, 3, 1, 0], [1, 0, 2, 1], [2, 2, 0, 0], [2, 1, 1, 0]]) / QUARTERS
Q = np.array([[2, 0, 1, 1], [2, 1, 1, 0], [2, 2, 0, 0], [0, 1, 1, 2], [1, 1, 2, 0]]) / QUARTERS
Tokens = tuple[int, ...]
Law = dict[Tokens, float]


def target_law(length: int = LENGTH) -> dict[Any, float]:
    """What plain sampling gives: the product of the target's laws."""
    found: Law = {(): 1.0}
    for _ in range(length):
        found = {(*t, a): f * P[last(t)][a] for t, f in found.items() for a in range(VOCAB) if P[last(t)][a] > 0}
    return found


def last(tokens: Tokens) -> int:
    """The state that `tokens` lead to."""
    return tokens[-1] if tokens else START


def reported(before: int, draft: Tokens, kind: str) -> SparseLaw | None:
    """What the drafter says its tokens were drawn from, in one of the ways that drafters have."""
    rows = Q[[before, *draft[:-1]]]
    if kind == "one-hot":
        return None
    if kind == "another":
        rows = np.full_like(rows, 1 / VOCAB)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, : 3 if kind == "candidates" else VOCAB]
    return SparseLaw(ids.astype(np.int32), np.take_along_axis(rows, ids, axis=1).astype(np.float32))


def trial(before: int, draft: Tokens, kind: str, noise: tuple[int, int, int]) -> tuple[list[torch.Tensor], Trial]:
    """Rows of logits, and the trial that they are for."""
    rows = [torch.from_numpy(P[state]).float().log() for state in (before, *draft)]
    q = reported(before, draft, kind) if draft else None
    return rows, Trial(Draft(list(draft), q), [RowLaw(1.0, 0, 1.0, 0, i) for i in range(len(rows))], noise)


@functools.cache
def outcomes(before: int, draft: Tokens, kind: str) -> Law:
    """Law of the tokens that the verifier commits after `before` for this draft, over its own noise alone."""
    grid = list(itertools.product(range(QUARTERS), repeat=len(draft)))
    rows, trials = zip(*(trial(before, draft, kind, (i, 0, 0)) for i in range(len(grid))), strict=True)
    drawn: list[torch.Tensor] = []

    def weigh(weights: torch.Tensor, keys: list[Any]) -> list[int]:
        drawn.append(torch.softmax(weights, dim=-1))
        return [0] * len(keys)

    def u(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[(grid[i][slot - 1] + 0.5) / QUARTERS] for i, slot in keys.tolist()])

    with (
        mock.patch.object(acceptance, "noise_key", lambda number, attempt, turn, slot, stream: (number, slot)),
        mock.patch.object(acceptance, "uniform", u),
        mock.patch.object(acceptance, "draw_from", weigh),
    ):
        verdicts = judge(torch.stack([row for each in rows for row in each]), list(trials))
    found: defaultdict[Tokens, float] = defaultdict(float)
    for verdict, weights in zip(verdicts, drawn[0].tolist(), strict=True):
        for token, weight in enumerate(weights):
            found[(*verdict[:-1], token)] += weight / len(grid)
    return {tokens: f for tokens, f in found.items() if f > 0}


@dataclass(frozen=True)
class Round:
    """One way that a round may begin: how likely it is, what was drafted, and how much of it is verified."""

    probability: float
    drafted: Tokens
    verified: int
    kind: str
    noise: Tokens = ()
    """Values of the draft's noise, for policies that use it again."""


Policy = Callable[[Tokens, Any], Iterator[Round]]
"""(tokens so far, memory) -> the ways the next round may begin."""
Remember = Callable[[Any, Round, Tokens, Tokens], Any]
"""(memory, the round, tokens before it, tokens it committed) -> memory."""


def drawn(before: int, count: int) -> Iterator[tuple[float, Tokens]]:
    """Every draft of `count` tokens and how likely it is."""
    for draft in itertools.product(range(VOCAB), repeat=count):
        probability = float(np.prod([Q[a][b] for a, b in itertools.pairwise((before, *draft))]))
        if probability > 0:
            yield probability, draft


def play(policy: Policy, remember: Remember = lambda memory, *_: memory, memory: Any = None) -> Law:
    """Law of the first LENGTH tokens over as many rounds as they take."""
    states: dict[tuple[Tokens, Any], float] = {((), memory): 1.0}
    done: defaultdict[Tokens, float] = defaultdict(float)
    while states:
        following: defaultdict[tuple[Tokens, Any], float] = defaultdict(float)
        for (tokens, known), chance in states.items():
            for turn in policy(tokens, known):
                for new, share in outcomes(last(tokens), turn.drafted[: turn.verified], turn.kind).items():
                    f = chance * turn.probability * share
                    if len(tokens) + len(new) >= LENGTH:
                        done[(tokens + new)[:LENGTH]] += f
                    else:
                        following[tokens + new, remember(known, turn, tokens, new)] += f
        states = dict(following)
    return dict(done)


def distance(one: Law, other: Law) -> float:
    """Total variation."""
    return sum(abs(one.get(t, 0.0) - other.get(t, 0.0)) for t in one.keys() | other.keys()) / 2
