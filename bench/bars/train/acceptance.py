"""Acceptance length of whole blocks, greedy, by task, as training/acceptance.py counts: against limits and n-grams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from bench import drafter
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from deploy.config import DEFAULT_MODEL
from services.model.fetch import resolve
from training import acceptance
from training.acceptance import Acceptance
from training.conversations import spread
from training.evaluate import cluster, summary

MINUTES = 10
_PROMPTS = 40  # of each task
LIMITS = {"gsm8k": 2.5, "humaneval": 2.1, "mt_bench": 1.7}
LIGHTLY_TRAINED = {"gsm8k": 1.98, "humaneval": 1.66, "mt_bench": 1.36}
"""Of a drafter of the same shape after 44 minutes of training on 210 thousand tokens."""
AIM = 3.5


def by_task(bench: Bench, checkpoint: Path | None, name: str, count: int = _PROMPTS) -> dict[str, Acceptance]:
    """What the drafter brings on `count` of the bench's prompts of each task; without a checkpoint that is n-grams.

    `name` is for progress.
    """
    model, found = resolve(DEFAULT_MODEL, allow_fetch=True), {}
    with cluster(model, checkpoint, drafter.BLOCK_DRAFTS, drafter.VOCABULARY) as llm:
        for task, texts in bench.prompts.by_task.items():
            some = spread(texts, bench.rounds(count))
            found[task] = acceptance.measure(llm, some, temperature=0.0, max_draft_tokens=drafter.BLOCK_DRAFTS)
            bench.say(f"{name}, {task}: {found[task].pooled:.2f}")
    return found


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Three bars per task that has limits, one for any other."""
    ours, ngram = by_task(bench, bench.checkpoint(), "the drafter"), by_task(bench, None, "n-grams")
    for task, found in ours.items():
        yield _bar(task, found, LIMITS.get(task), aim=AIM)
        yield _bar(f"{task}, above n-grams", found, ngram[task].pooled)
        if task in LIGHTLY_TRAINED:
            yield _bar(f"{task}, above a lightly trained one", found, LIGHTLY_TRAINED[task])


def _bar(name: str, found: Acceptance, limit: float | None, aim: float | None = None) -> Bar:
    told = summary(found)
    note = f"mean of {told['requests']} requests {told['per_request']:.2f}; {told['excluded']:.0%} left out in loops"
    samples = {"tokens": [a.tokens for a in found.answers], "steps": [a.steps for a in found.answers]}
    return Bar(name, found.pooled, ">=", limit, spread=found.interval, aim=aim, note=note, samples=samples)
