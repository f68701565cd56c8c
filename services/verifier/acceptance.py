"""The acceptance rule `match`: a drafted token stands while it equals the target's own choice."""

from __future__ import annotations

from collections.abc import Sequence


def match(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """How many tokens of the draft x1..xK are accepted.

    `chosen` holds the target's own K + 1 tokens, the j-th drawn after x1..xj-1 with the noise of its position. The
    accepted prefix and the token after it are chosen[: accepted + 1]: exactly what decoding one by one would give.
    """
    assert len(chosen) == len(draft) + 1, "one row per drafted token and one for the bonus"
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return accepted
