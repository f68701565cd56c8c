"""What sampling options change in one row's logits, before temperature and filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of one row. Ids are distinct, int64 [n], in any order; None means no such change.

    bias      ids, and what is added to each (float32 [n])
    seen      ids of the prompt and of the answer so far, for the `repetition` penalty
    produced  ids of the answer so far, and how often each came (float32 [n]), for `frequency` and `presence`
    allowed   all other ids are excluded
    held      excluded: ids that would end an answer too early
    banned    excluded, unless nothing else is left
    """

    bias: tuple[Tensor, Tensor] | None = None
    repetition: float = 1.0
    seen: Tensor | None = None
    frequency: float = 0.0
    presence: float = 0.0
    produced: tuple[Tensor, Tensor] | None = None
    allowed: Tensor | None = None
    held: Tensor | None = None
    banned: Tensor | None = None

    @property
    def any(self) -> bool:
        """Whether anything changes."""
        parts = (self.bias, self.seen, self.produced, self.allowed, self.held, self.banned)
        return any(part is not None for part in parts)


def apply(row: Tensor, edits: Edits) -> None:
    """Changes one row of logits, float32 [V], in place.

    Bias, then the penalties of repetition (Keskar 2019, as in transformers), frequency and presence (OpenAI). Masks
    come last, though an engine may say that they come first: an excluded id is -inf whatever is done to it before or
    after. Penalties do not overflow, so that only masks exclude, and at least one id is left.
    """
    if edits.bias is not None:
        ids, added = edits.bias
        row[ids] += added
    if edits.seen is not None:
        values = row[edits.seen]
        values = torch.where(values > 0, values / edits.repetition, values * edits.repetition)
        row[edits.seen] = values.clamp_(-_LARGEST, _LARGEST)
    if edits.produced is not None:
        ids, counts = edits.produced
        row[ids] = (row[ids] - counts * edits.frequency - edits.presence).clamp_(-_LARGEST, _LARGEST)
    _mask(row, edits)


def _mask(row: Tensor, edits: Edits) -> None:
    if edits.allowed is not None:
        values = row[edits.allowed]
        row.fill_(-torch.inf)
        row[edits.allowed] = values
    if edits.held is not None:
        row[edits.held] = -torch.inf
    if edits.banned is not None:
        values = row[edits.banned]
        row[edits.banned] = -torch.inf
        if row.amax() == -torch.inf:
            row[edits.banned] = values
