"""What drafting costs: a pass of the drafter's own code against a plain step of the engine, in turn, on one machine.

Between plain steps the drafter takes in the rows of two new tokens per request, runs one block for all of them and
walks the selector, over the whole vocabulary and over a draft vocabulary by turns. Rows are random: their content
costs nothing. Contexts grow from 150 to 250 tokens or so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from bench import drafter, stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.stand import Stand, contexts
from deploy.config import DEFAULT_MODEL
from kadence.internal import common_pb2
from services.drafter.methods import FeatureRows, Method, NewTokens, ProposeItem, Setting, create
from services.model.fetch import resolve
from services.runtime.config import ModelConfig
from services.runtime.threads import in_passing
from services.verifier.draft import Draft
from services.verifier.drafting import Drafting
from services.verifier.engine import Limits
from services.verifier.features import FeatureStore
from services.verifier.planning import PrefillBudget
from services.verifier.request import Request

MINUTES = 2
_CONTEXT, _COMMITTED = 150, 2
_STEPS = 40  # of each kind
_MORE = 32  # steps until the last prompt is computed, and the first answers decode
_WARM = 3  # kernels are made per shape, when it first comes
_KINDS = ("plain", "whole vocabulary", "draft vocabulary")
LIMITS: dict[int, dict[str, float | None]] = {
    1: {"whole vocabulary": 0.30, "draft vocabulary": 0.30},
    32: {"whole vocabulary": 1.0, "draft vocabulary": 0.45},
}


class Passes(Drafting):
    """In the place of a drafter: runs its passes in every step but one in three, and gives nothing of them away."""

    projection = None  # the engine makes no feature rows

    def __init__(self, methods: dict[str, Method]) -> None:
        self._methods = methods
        self._wants: list[tuple[Request, int]] = []
        self.begin()

    def begin(self) -> None:
        """Forgets all times."""
        self._turn = 0
        self._last = 0.0
        self.seconds: dict[str, list[float]] = {kind: [] for kind in _KINDS}

    def note(self, step_seconds: float) -> None:
        """A step of all requests is over: its time counts, or that of the pass in it."""
        seconds = self._last if self.kind in self._methods else step_seconds
        if seconds:
            self.seconds[self.kind].append(seconds)
        self._turn += 1

    @property
    def kind(self) -> str:
        """What this step is for."""
        return _KINDS[self._turn % len(_KINDS)]

    def ask(self, step: int, wants: list[tuple[Request, int]], features: FeatureStore) -> None:
        self._wants = wants

    def collect(self, patience: float) -> dict[str, Draft]:
        self._last = 0.0
        if self._wants and self.kind in self._methods:
            self._last = self._pass(self._methods[self.kind], [request for request, _ in self._wants])
        return {}

    def forget(self, request: Request) -> None:
        pass

    def flush(self) -> None:
        pass

    def _pass(self, method: Method, requests: list[Request]) -> float:
        lengths = dict(enumerate((len(request.tokens) for request in requests), 1))
        for key in lengths:
            method.open(key)
        # All but the newest rows are there before, as from earlier rounds.
        method.commit([_news(key, 0, length - 1 - _COMMITTED, method) for key, length in lengths.items()])
        begun = time.perf_counter()
        method.commit([_news(key, length - 1 - _COMMITTED, _COMMITTED, method) for key, length in lengths.items()])
        method.propose([ProposeItem(key, drafter.BLOCK_DRAFTS, base_length=length) for key, length in lengths.items()])
        seconds = time.perf_counter() - begun
        for key in lengths:
            method.close(key)
        return seconds


def _news(key: int, base: int, count: int, method: Method) -> NewTokens:
    width = method.traits.feature_width
    data = torch.randn(count, width).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return NewTokens(key, [7] * count, FeatureRows(base, (count, width), common_pb2.DTYPE_BFLOAT16, data))


def _methods(folder: Path, ranked: Path) -> dict[str, Method]:
    """The drafter with either vocabulary."""
    model = ModelConfig(path=str(resolve(DEFAULT_MODEL, allow_fetch=True)))
    setting = Setting(drafter.BLOCK_DRAFTS, max(LIMITS), 16_384, model)
    options = {"checkpoint": str(folder), "dtype": "bfloat16", "draft_vocabulary_file": str(ranked)}
    return {
        kind: create("dflash2", {**options, "draft_vocabulary": size}, setting)
        for kind, size in (("whole vocabulary", 0), ("draft vocabulary", drafter.VOCABULARY))
    }


def _build(folder: Path, ranked: Path) -> tuple[Passes, Stand]:
    """An engine with the drafter beside it in its thread."""
    passes = Passes(_methods(folder, ranked))
    limits = Limits(64, 512, 64, 1024, 1024, 16, 1.0, PrefillBudget(512))
    return passes, Stand("bfloat16", limits, passes, drafter.BLOCK_DRAFTS, lambda report: passes.note(report.seconds))


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per number of sessions and vocabulary."""
    prompts = contexts(bench.prompts.take(max(LIMITS)), _CONTEXT - 32, 2)
    with tempfile.TemporaryDirectory(prefix="kadence-bars-") as scratch:
        folder = bench.checkpoint()
        ranked = drafter.draft_vocabulary(folder, Path(scratch))
        passes, stand = in_passing(lambda: _build(folder, ranked))
    for sessions, limits in LIMITS.items():
        passes.begin()
        stand.run(prompts[:sessions], len(_KINDS) * (bench.rounds(_STEPS) + _WARM) + _MORE)
        seconds = {kind: each[_WARM:] for kind, each in passes.seconds.items()}
        medians = {kind: 1000 * stats.median(each).value for kind, each in seconds.items()}
        bench.say(f"{sessions} sessions: " + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in medians.items()))
        for kind, limit in limits.items():
            yield Bar.of(
                f"{sessions} session{'s' * (sessions > 1)}, {kind}",
                stats.ratio(seconds[kind], seconds["plain"]),
                "<=",
                limit,
                unit="of a plain step",
                note=f"{medians[kind]:.1f} ms and {medians['plain']:.1f} ms",
                samples=dict(seconds),
            )
    stand.engine.close()
