"""What a run of bars says at its end, and the file with everything it measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.bars.bar import Bar


def last_line(bars: Sequence[tuple[str, Bar]]) -> str:
    """`N of M hold; worst: ...`: the bar with the least to spare."""
    judged = [(name, bar) for name, bar in bars if bar.passed is not None]
    held = sum(bool(bar.passed) for _, bar in judged)
    if not judged:
        return "0 of 0 hold; worst: none was measured"
    name, bar = min(judged, key=lambda item: (bool(item[1].passed), item[1].margin))
    against = f" against {bar.kind} {bar.limit:g}" if bar.limit is not None else ""
    return f"{held} of {len(judged)} hold; worst: {name}/{bar.name}, {bar.value}{against}"


def write(path: Path, run: dict[str, Any], bars: Sequence[tuple[str, Bar]]) -> None:
    """Writes the run's facts and every bar with its samples as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = [{"capability": name, **asdict(bar), "passed": bar.passed} for name, bar in bars]
    path.write_text(json.dumps({**run, "bars": listed}, indent=1, default=str) + "\n", encoding="utf-8")
