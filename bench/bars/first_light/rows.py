"""What verifying costs: the time of an engine step with 1 + 7 rows per request against one with a single row.

The verifier's own engine runs, without services around it, on real prompts; contexts grow from 150 to 250 tokens or so.
Every other step gets drafts of 7 tokens, so both kinds of step meet the same contexts on the same machine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.stand import Stand, contexts
from services.runtime.threads import in_passing
from services.verifier.draft import Draft
from services.verifier.drafting import Drafting
from services.verifier.engine import Limits
from services.verifier.features import FeatureStore
from services.verifier.outcomes import StepReport
from services.verifier.request import Request

MINUTES = 1
_K = 7
_CONTEXT = 150
_STEPS = 48  # of each kind
_MORE = 40  # tokens until the last prompt is computed, and of the last draft
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


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Two bars: one request, and sixteen."""
    prompts = contexts(bench.prompts.take(max(LIMITS)), _CONTEXT - 24, 3)
    seconds: dict[int, list[float]] = {}

    def note(report: StepReport) -> None:
        seconds.setdefault(report.rows, []).append(report.seconds)

    limits = Limits(64, 512, 64, 1024, 512, 16, 1.0)
    stand = in_passing(lambda: Stand("auto", limits, EveryOtherStep(), _K, note))
    bench.say(f"{stand.engine.attention} attention")
    steps = bench.rounds(_STEPS) + _WARM
    for requests, limit in LIMITS.items():
        seconds.clear()
        stand.run(prompts[:requests], 2 * steps + _MORE)
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
