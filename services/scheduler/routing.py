"""Chooses the verifier of a request: the one with the least work in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A verifier as routing sees it."""

    replica_id: str
    outstanding: int
    """Tokens of our requests there that are not yet prefilled or produced; ours, so it is never late."""
    in_flight: int
    capacity: int
    reported: int = 0
    """Outstanding tokens it reported; up to a report's age late, so it only breaks ties."""


def choose(candidates: Sequence[Candidate], avoid: str = "") -> str | None:
    """Id of the verifier to send the next request to; None if none has room.

    `avoid` (a verifier that just failed this request) is taken only if there is no other.
    """
    free = [c for c in candidates if c.in_flight < c.capacity]
    if not free:
        return None
    best = min(free, key=lambda c: (c.replica_id == avoid, c.outstanding, c.reported, c.in_flight, c.replica_id))
    return best.replica_id


def work(prompt_tokens: int, produced: int, max_tokens: int, *, prefilled: bool) -> int:
    """Outstanding tokens of one request: what is left to produce and, until its first token, to prefill."""
    left = max(0, max_tokens - produced)
    return left if prefilled else left + prompt_tokens + produced
