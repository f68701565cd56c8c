"""How many drafted tokens each request verifies this step. Pure: no clock, no draft contents, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The scheduler's order in force. `epoch` is (boot id, counter); larger is newer."""

    name: str = "off"
    max_draft_tokens: int = 0
    epoch: tuple[int, int] = (0, 0)


def wanted(policy: Policy, cap: int | None, remaining: int) -> int:
    """Tokens to draft for one request: the policy's K, below the request's own cap and what it may still produce.

    The step itself commits one token beyond the accepted ones, so the last token needs no draft.
    """
    limit = policy.max_draft_tokens if cap is None else min(policy.max_draft_tokens, cap)
    return max(0, min(limit, remaining - 1))


def fit(drafted: list[int], budget: int) -> list[int]:
    """K per request so that all rows, 1 + K each, fit `budget`; shares are even, earlier requests first."""
    rows = len(drafted)
    free = max(0, budget - rows)
    counts = [0] * rows
    for depth in range(max(drafted, default=0)):
        for i, n in enumerate(drafted):
            if n > depth and free > 0:
                counts[i] += 1
                free -= 1
    return counts
