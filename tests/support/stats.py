"""Pearson's chi-square test, without scipy."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from statistics import NormalDist

_LEAST_EXPECTED = 5.0


def chi_square_p(samples: Iterable[Hashable], law: Mapping[Hashable, float]) -> float:
    """p-value of `samples` under `law` (outcome -> probability); 0 for an outcome that the law excludes.

    Cells that expect fewer than five are merged. Wilson and Hilferty's cube root gives the tail, good to a few percent
    from three cells on.
    """
    counts: dict[Hashable, int] = {}
    for sample in samples:
        counts[sample] = counts.get(sample, 0) + 1
    total = sum(counts.values())
    if any(law.get(outcome, 0.0) <= 0 for outcome in counts):
        return 0.0
    statistic, cells, rest_seen, rest_expected = 0.0, 0, 0, 0.0
    for outcome, probability in law.items():
        seen, expected = counts.get(outcome, 0), total * probability
        if expected < _LEAST_EXPECTED:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
        else:
            statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if rest_expected:
        statistic += (rest_seen - rest_expected) ** 2 / max(rest_expected, 1.0)
        cells += 1
    freedom = cells - 1
    assert freedom >= 1, "one cell tells nothing"
    variance = 2 / (9 * freedom)
    return 1 - NormalDist().cdf(((statistic / freedom) ** (1 / 3) - (1 - variance)) / variance**0.5)
