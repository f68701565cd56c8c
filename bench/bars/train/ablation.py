"""What the drafter's parts bring: its selector, measured here, and what its card tells of drafters trained without one.

The card's numbers are in ablation.json beside the weights: by part, acceptance lengths by task "with" and "without" it
after the same training, and the "budget" in words.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.bars.train.acceptance import by_task
from training.acceptance import interval
from training.offline import without_selector

MINUTES = 5
_PROMPTS = 20  # of each task


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per task for the selector; told without one, what the card says."""
    folder = bench.checkpoint()
    with tempfile.TemporaryDirectory(prefix="kadence-bars-") as scratch:
        whole = by_task(bench, folder, "with its selector", _PROMPTS)
        bare = by_task(bench, without_selector(folder, Path(scratch) / "bare"), "without", _PROMPTS)
    for task, found in whole.items():
        gain = found.pooled / bare[task].pooled
        # The greedy answers are the same but for roundings, so their steps alone are compared.
        pairs = [(b.steps, w.steps) for w, b in zip(found.answers, bare[task].answers, strict=True) if w.steps]
        note = f"{found.pooled:.2f} with and {bare[task].pooled:.2f} without it, the same weights otherwise"
        yield Bar(f"selector, {task}", gain, ">=", 1.0, unit="x", spread=interval(pairs), note=note)
    card = folder / "ablation.json"
    if not card.exists():
        bench.say(f"{card} is not there: nothing is told of drafters that were trained without a part")
        return
    for bar in told(json.loads(card.read_text(encoding="utf-8"))):
        yield bar


def told(card: Mapping[str, Any]) -> list[Bar]:
    """What the card says, one line per part and task."""
    bars = []
    for part, numbers in card.items():
        for task, length in numbers["with"].items():
            other = numbers["without"][task]
            note = f"{length:.2f} with and {other:.2f} without it, {numbers['budget']} each; from the card"
            bars.append(Bar(f"{part} at equal budget, {task}", length / other, ">=", unit="x", note=note))
    return bars
