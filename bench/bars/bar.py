"""A bar: one number that was measured, and what it must be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.stats import Estimate


@dataclass(frozen=True)
class Bar:
    """One measurement against its limit. Without a limit it is only told, and neither holds nor fails."""

    name: str
    measured: float | None
    """None if it could not be measured, which fails."""
    kind: Literal[">=", "<="] = "<="
    limit: float | None = None
    unit: str = ""
    spread: tuple[float, float] | None = None
    aim: float | None = None
    """What it would better be."""
    note: str = ""
    """One line more, such as what was compared with what."""
    samples: dict[str, Any] = field(default_factory=dict)
    """Everything the number was made of; JSON types."""

    @classmethod
    def of(cls, name: str, estimate: Estimate, kind: Literal[">=", "<="], limit: float | None, **more: Any) -> Bar:
        """A bar on an estimate; its interval is the spread."""
        return cls(name, estimate.value, kind, limit, spread=(estimate.low, estimate.high), **more)

    @classmethod
    def count(cls, name: str, wrong: int, of: int, **more: Any) -> Bar:
        """A bar on how many of `of` are wrong: none may be, and there must be some to judge."""
        return cls(name, float(wrong) if of else None, "<=", 0, unit=f"of {of}", **more)

    @property
    def passed(self) -> bool | None:
        """Whether it holds; None if there is no limit."""
        if self.measured is None or math.isnan(self.measured):
            return False
        if self.limit is None:
            return None
        return self.measured >= self.limit if self.kind == ">=" else self.measured <= self.limit

    @property
    def margin(self) -> float:
        """Above 1 it holds with that much to spare, below 1 it fails by that much; exact bars are infinite or 0."""
        if self.measured is None or self.limit is None or math.isnan(self.measured):
            return 0.0
        if self.measured <= 0 or self.limit <= 0:
            return math.inf if self.passed else 0.0
        return self.measured / self.limit if self.kind == ">=" else self.limit / self.measured

    def line(self, prefix: str = "") -> str:
        """PASS|FAIL name: measured (spread) bar; or INFO where there is no limit."""
        word = {True: "PASS", False: "FAIL", None: "INFO"}[self.passed]
        parts = [f"{word} {prefix}{self.name}: {self.value}"]
        if self.spread is not None:
            parts.append(f"({number(self.spread[0])}..{number(self.spread[1])})")
        if self.limit is not None:
            parts.append(f"bar {self.kind} {self.limit:g}")
        text = " ".join(parts)
        if self.aim is not None:
            text += f", aim {self.aim:g}"
        return f"{text}; {self.note}" if self.note else text

    @property
    def value(self) -> str:
        """The measured number with its unit."""
        if self.measured is None:
            return "not measured"
        return f"{number(self.measured)} {self.unit}".strip()


def number(value: float) -> str:
    """Three significant digits; whole numbers in full."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value):
        return str(int(value))
    return f"{value:.{min(4, max(0, 2 - math.floor(math.log10(abs(value)))))}f}"
