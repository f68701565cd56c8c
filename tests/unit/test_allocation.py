"""How many draft tokens are asked for and verified: limits, even shares, and never more rows than there is room."""

from __future__ import annotations

import itertools
import random

import pytest

from services.verifier.allocation import Policy, fit, wanted


@pytest.mark.parametrize(
    ("policy", "cap", "remaining", "count"),
    [
        (7, None, 100, 7),
        (7, 3, 100, 3),
        (3, 7, 100, 3),
        (7, 0, 100, 0),
        (0, None, 100, 0),
        (7, None, 8, 7),
        (7, None, 7, 6),  # the step commits one token beyond the accepted ones
        (7, None, 1, 0),
        (7, None, 0, 0),
    ],
)
def test_wanted(policy: int, cap: int | None, remaining: int, count: int) -> None:
    assert wanted(Policy("fixed", policy), cap, remaining) == count


def test_default_policy_is_off() -> None:
    assert wanted(Policy(), None, 100) == 0 and Policy().epoch == (0, 0)


def test_epochs_order_by_boot_then_counter() -> None:
    assert (1, 9) < (2, 1) < (2, 2)


@pytest.mark.parametrize(
    ("drafted", "budget", "counts"),
    [
        ([], 10, []),
        ([7, 7], 16, [7, 7]),
        ([7, 7], 15, [7, 6]),
        ([7, 7], 4, [1, 1]),
        ([7, 7], 2, [0, 0]),
        ([7, 7], 1, [0, 0]),
        ([1, 7, 3], 9, [1, 3, 2]),
        ([0, 2, 0], 4, [0, 1, 0]),
    ],
)
def test_fit(drafted: list[int], budget: int, counts: list[int]) -> None:
    assert fit(drafted, budget) == counts


def test_fit_fills_the_budget_evenly() -> None:
    rng = random.Random(0)
    for _ in range(500):
        drafted = [rng.randint(0, 8) for _ in range(rng.randint(0, 12))]
        budget = rng.randint(0, 80)
        counts = fit(drafted, budget)
        assert all(0 <= count <= n for count, n in zip(counts, drafted, strict=True))
        free = max(0, budget - len(drafted))
        assert sum(counts) == min(free, sum(drafted))
        # Who got less than another could not use more, or comes later and lacks one.
        for (i, a), (j, b) in itertools.permutations(enumerate(counts), 2):
            assert a >= b or a == drafted[i] or (a == b - 1 and i > j)
