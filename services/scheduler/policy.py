"""Policies by name, and the epochs that order them in time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kadence.errors import ConfigError

MAX_DRAFT_TOKENS = 64
_FIXED = re.compile(r"fixed:([0-9]{1,4})")


class Epoch(NamedTuple):
    """When a policy was made; compares by boot id, then counter."""

    boot_id: int
    """Nanoseconds since 1970 when the owning scheduler started."""
    counter: int
    """Counts that scheduler's policies, from 1."""

    def __str__(self) -> str:
        return f"{self.boot_id}:{self.counter}"


NO_EPOCH = Epoch(0, 0)
"""Older than any."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How many drafted tokens are verified."""

    name: str
    max_draft_tokens: int


def parse(name: str) -> Policy:
    """The policy called "off" or "fixed:K", K from 0 to 64. Raises ConfigError with the reason."""
    if name == "off":
        return Policy(name, 0)
    match = _FIXED.fullmatch(name)
    if match is None:
        raise ConfigError("unknown policy; off or fixed:K, such as fixed:7")
    count = int(match[1])
    if count > MAX_DRAFT_TOKENS:
        raise ConfigError(f"K is {count}; at most {MAX_DRAFT_TOKENS}")
    return Policy(f"fixed:{count}", count)


def succeed(mine: Epoch, held: Epoch) -> Epoch:
    """The epoch for my policy when a replica holds one of `held`: mine if that already wins, else the next after it."""
    return mine if mine >= held else Epoch(held.boot_id, held.counter + 1)
