"""Judges a differing token: a near tie of the target in float64 may fall either way.

The gap is taken after noise and filters, at the first differing token; rounding of float32 cannot bridge more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.reference import Reference
from services.kernels.noise_ref import gumbel, key_tensor, noise_key
from services.model.probs import keep

NEAR = 1e-4


@dataclass(frozen=True)
class Law:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Difference:
    """Two answers part at `index`; `near` if the target itself hardly prefers one of the two tokens."""

    index: int
    gap: float
    near: bool


def judge(
    reference: Reference, prompt: list[int], ours: list[int], theirs: list[int], law: Law | None = None
) -> Difference | None:
    """Where two answers to `prompt` first differ, and whether that is a near tie; None if they are equal."""
    if ours == theirs:
        return None
    shorter = min(len(ours), len(theirs))
    index = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
    if index == shorter:  # one ended earlier, although all its tokens are the other's
        return Difference(index, float("inf"), False)
    logits = reference.exact_logits(prompt + ours[:index])
    gap = _gap(logits, law or Law(), len(prompt) + index, ours[index], theirs[index])
    return Difference(index, gap, gap < NEAR)


def _gap(logits: Tensor, law: Law, position: int, first: int, second: int) -> float:
    """By how much the less likely of the two tokens loses, in logits; 0 if the filter's edge runs between them."""
    if law.temperature == 0:
        return float(logits.max() - logits[[first, second]].min())
    winners = set()
    for top_p in (law.top_p - NEAR, law.top_p, law.top_p + NEAR):
        scores = _noisy(logits / law.temperature, replace(law, top_p=min(1.0, top_p)), position)
        winners.add(max(scores, key=scores.__getitem__))
    if winners == {first, second}:
        return 0.0
    scores = _noisy(logits / law.temperature, law, position)
    lost = -float("inf")
    return max(scores.values()) - min(scores.get(first, lost), scores.get(second, lost))


def _noisy(scaled: Tensor, law: Law, position: int) -> dict[int, float]:
    """What each token that the filter keeps has to show when the best one is drawn."""
    ids = keep(scaled, 0, law.top_p)
    noise = gumbel(key_tensor([noise_key(law.seed, position)]), ids.to(torch.int32)[None])[0]
    return dict(zip(ids.tolist(), (scaled[ids] + noise.double()).tolist(), strict=True))
