"""Ten minutes of training from a given checkpoint, on given features: the loss on held-out conversations goes down.

The recipe is the default one but for the checkpoint's shape, its warm-up, and as many steps as those minutes hold.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import torch

from bench import drafter
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from deploy.config import DEFAULT_MODEL
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.model.fetch import resolve
from training.examples import Cache
from training.recipe import Recipe
from training.trainer import Trainer

MINUTES = 12
_SECONDS = 600
_TIMED = 10  # steps that tell how long one takes; kernels are made in those before them


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One bar: how much the loss changes."""
    if bench.features is None or bench.start is None:
        told = "left out: --features FOLDER and --start CHECKPOINT say what to train on, and from where"
        bench.say(told)
        yield Bar("trained minutes", 0.0, note=told)
        return
    seconds = _SECONDS if not bench.quick else 30
    with tempfile.TemporaryDirectory(prefix="kadence-bars-") as scratch:
        ranking = drafter.draft_vocabulary(bench.start, Path(scratch))
        recipe = shaped(read_draft_arch(bench.start))
        trainer = _trainer(bench, recipe, ranking)
        took = _seconds_per_step(trainer)
        recipe = replace(recipe, steps=max(2, int(seconds / took)))
        trainer = _trainer(bench, replace(recipe, warm_up=max(1, recipe.steps // 20)), ranking)
        bench.say(f"{recipe.steps} steps of {took:.2f} s")
        before = trainer.look()
        while trainer.step < recipe.steps:
            trainer.advance()
        after = trainer.look()
    note = ", ".join(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in before)
    samples = {"before": before, "after": after, "steps": recipe.steps}
    change = after["loss"] - before["loss"]
    yield Bar(f"change of the held-out loss in {seconds / 60:g} minutes", change, "<=", 0.0, note=note, samples=samples)


def shaped(arch: DraftArch) -> Recipe:
    """The default recipe for a drafter of that shape."""
    return Recipe(
        kind=arch.kind,
        taps=arch.taps,
        layers=arch.num_layers,
        rank=arch.selector_rank,
        convolution=bool(arch.conv_taps),
        block=arch.block_size,
        mask_token=arch.mask_token_id or 0,
    )


def _trainer(bench: Bench, recipe: Recipe, ranking: Path) -> Trainer:
    assert bench.features is not None
    model = resolve(DEFAULT_MODEL, allow_fetch=True)
    trainer = Trainer(recipe, model, Cache(bench.features), ranking, torch.device("cpu"))
    trainer.begin(bench.start)
    return trainer


def _seconds_per_step(trainer: Trainer) -> float:
    for _ in range(3):
        trainer.advance()
    begun = time.monotonic()
    for _ in range(_TIMED):
        trainer.advance()
    return (time.monotonic() - begun) / _TIMED
