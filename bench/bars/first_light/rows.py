"""What verifying costs: the time of an engine step with 1 + 7 rows per request against one with a single row.

The verifier's own engine runs, without services around it, on real prompts; contexts grow from 150 to 250 tokens or so.
Every other step gets drafts of 7 tokens, so both kinds of step meet the same contexts on the same machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator

import torch

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.reference import Reference
from deploy.config import DEFAULT_MODEL
from services.model.fetch import resolve
from services.runtime.threads import in_passing
from services.verifier.allocation import Policy
from services.verifier.draft import Draft
from services.verifier.drafting import Drafting
from services.verifier.engine import Engine, Limits
from services.verifier.features import FeatureStore
from services.verifier.outcomes import StepReport
from services.verifier.request import Request, Sampling
from services.verifier.target import Target

MINUTES = 1
_K = 7
_CONTEXT = 150
_STEPS = 48  # of each kind
_WARM = 3  # kernels are made per shape, when it first comes
LIMITS = {1: 1.5, 16: 3.2}


class EveryOtherStep(Drafting):
    """In the place of a drafter: drafts for all who ask, in every other step, without delay."""

    projection = None  # it reads no feature rows

    def __init__(self) -> None:
        self._wants: list[tuple[Request, int]] = []
        self._turn = False

    def ask(self, step: int, wants: list[tuple[Request, int]], features: FeatureStore) -> None:
        self._wants, self._turn = wants, not self._turn

    def collect(self, patience: float) -> dict[str, Draft]:
        # The prompt's own tokens: hardly ever what comes next, and as many rows as any.
        return {request.request_id: Draft(request.tokens[:most]) for request, most in self._wants if self._turn}

    def forget(self, request: Request) -> None:
        pass

    def flush(self) -> None:
        pass


class Stand:
    """An engine, and the lengths of the steps in which every request decoded, by rows."""

    def __init__(self) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        target = Target(resolve(DEFAULT_MODEL, allow_fetch=True), "auto")
        target.prepare(1024)
        limits = Limits(64, 512, 64, 1024, 512, 16, 1.0)
        self.engine = Engine(target, limits, EveryOtherStep(), self._on_step)
        self.engine.set_policy(Policy("fixed", _K, (1, 1)))
        self.engine.start()

    def run(self, prompts: list[list[int]], steps: int) -> dict[int, list[float]]:
        """Seconds of the steps that decoded all `prompts`, by rows of the step."""
        self._seconds: dict[int, list[float]] = {}
        self._left, self._done = len(prompts), threading.Event()
        self._wanted = len(prompts)
        sampling = Sampling(0.0, 1.0, 0, 0, 2 * steps + _K + 1, frozenset(), None)
        for number, ids in enumerate(prompts):
            self.engine.submit(Request(str(number), 0, "bars", len(ids), list(ids), sampling))
        assert self._done.wait(300), "the engine hangs"
        return self._seconds

    def _on_step(self, report: StepReport) -> None:
        if sum(update.decode_step for update in report.updates) == self._wanted:
            self._seconds.setdefault(report.rows, []).append(report.seconds)
        self._left -= sum(update.terminal is not None for update in report.updates)
        if not self._left:
            self._done.set()


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Two bars: one request, and sixteen."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    contexts = []
    for number, prompt in enumerate(bench.prompts.take(max(LIMITS))):
        ids = reference.prompt_ids(prompt)
        wanted = _CONTEXT - 24 + 3 * number  # requests are of different lengths
        contexts.append((ids * (wanted // len(ids) + 1))[:wanted])
    stand = in_passing(Stand)  # as the service builds it
    bench.say(f"{stand.engine.attention} attention")
    steps = bench.rounds(_STEPS) + _WARM
    for requests, limit in LIMITS.items():
        seconds = stand.run(contexts[:requests], steps)
        one, many = (seconds[rows][_WARM:] for rows in (requests, requests * (1 + _K)))
        a, b = 1000 * stats.median(many).value, 1000 * stats.median(one).value
        yield Bar.of(
            f"{requests} x {1 + _K} rows to {requests} x 1",
            stats.ratio(many, one),
            "<=",
            limit,
            unit="x",
            note=f"{a:.1f} ms and {b:.1f} ms, {stand.engine.attention} attention",
            samples={"many": many, "one": one},
        )
    stand.engine.close()
