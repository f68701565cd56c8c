"""Rule `match`: exactly the tokens that decoding one by one would give, whatever the draft."""

from __future__ import annotations

import itertools

import pytest

from services.verifier.acceptance import match


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
