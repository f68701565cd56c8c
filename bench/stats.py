"""Medians with their spread: what a measurement says, and how far to trust it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RESAMPLES = 2000
_Pick = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True)
class Estimate:
    """A value and the interval that holds it with 90 % confidence."""

    value: float
    low: float
    high: float


def quantile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, interpolated."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> Estimate:
    """The median; its interval is bootstrapped."""
    return _bootstrap(lambda pick: statistics.median(pick(samples)))


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """median(above) / median(below), of samples taken in turn; its interval is bootstrapped."""
    return _bootstrap(lambda pick: statistics.median(pick(above)) / statistics.median(pick(below)))


def quantile_difference(above: Sequence[float], below: Sequence[float], share: float) -> Estimate:
    """How much larger the quantile `share` is in `above` than in `below`; its interval is bootstrapped."""
    return _bootstrap(lambda pick: quantile(pick(above), share) - quantile(pick(below), share))


def slope(points: Sequence[tuple[float, float]]) -> Estimate:
    """Rise per unit of x as the median over all pairs of points (Theil-Sen): single jumps do not bend it."""
    rises = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for i, earlier in enumerate(points)
        for later in points[i + 1 :]
        if later[0] != earlier[0]
    ]
    return Estimate(statistics.median(rises), quantile(rises, 0.25), quantile(rises, 0.75))


def _bootstrap(statistic: Callable[[_Pick], float]) -> Estimate:
    generator = random.Random(0)  # the same samples give the same interval
    values = sorted(statistic(lambda samples: generator.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    return Estimate(statistic(lambda samples: samples), quantile(values, 0.05), quantile(values, 0.95))
