"""What a drafter proposes for one request in one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """The law q that each drafted token was drawn from: zero outside its candidates.

    ids int32 [n, candidates], probabilities float32 [n, candidates], each row summing to 1.
    """

    ids: np.ndarray
    probabilities: np.ndarray


@dataclass(frozen=True, slots=True)
class Draft:
    """x1..xn, and what comes with them. Without `q` the draft is deterministic: q is 1 at each drafted token."""

    token_ids: list[int]
    q: SparseLaw | None = None
    signals: np.ndarray | None = None
    """float32 [n, s]; row k says nothing that depends on x_k or later."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Draft:
        """The draft cut to its first `count` tokens."""
        if count >= len(self):
            return self
        q = None if self.q is None else SparseLaw(self.q.ids[:count], self.q.probabilities[:count])
        return Draft(self.token_ids[:count], q, None if self.signals is None else self.signals[:count])


NO_DRAFT = Draft([])
