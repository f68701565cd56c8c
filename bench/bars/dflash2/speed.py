"""Tokens per second with each drafter, told without a bar: one stream and 8, greedy and drawn, K, and the rule.

All clusters are up at once, what is not measured sleeps, and everything is measured in turn. The drafter is as trained
as its checkpoint is, and K is fixed: what drafts are worth decides nothing here yet.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import drafter, stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from kadence import AsyncClient

MINUTES = 10
_TOKENS, _ROUNDS = 96, 4
STREAMS, LENGTHS = (1, 8), (3, 5, 7)


@dataclass
class Case:
    """One way of drafting and sampling, and what was measured of it."""

    kind: str
    temperature: float
    rule: str
    k: int
    rates: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0

    @property
    def name(self) -> str:
        """For the bar."""
        drawn = f"T {self.temperature:g}, {self.rule}" if self.temperature else "greedy"
        return f"{self.kind} K {self.k}, {drawn}" if self.k else f"none, {drawn}"

    @property
    def options(self) -> dict[str, Any]:
        """Of its requests."""
        drawn = {"temperature": self.temperature, "rule": self.rule} if self.temperature else {"temperature": 0.0}
        return {**drawn, "max_draft_tokens": self.k, "seed": 1, "ignore_eos": True}


def _cases() -> list[Case]:
    laws = ((0.0, "match"), (0.8, "match"), (0.8, "ratio"))
    cases = [Case("ngram", temperature, "match", 0) for temperature in (0.0, 0.8)]
    cases += [Case("dflash2", *law, k) for law, k in itertools.product(laws, LENGTHS)]
    return cases + [Case("ngram", *law, k) for law, k in itertools.product(laws, LENGTHS)]


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One line per case and number of streams."""
    folder = bench.checkpoint()
    with tempfile.TemporaryDirectory(prefix="kadence-bars-") as scratch:
        ranked = drafter.draft_vocabulary(folder, Path(scratch))
        async with AsyncExitStack() as stack:
            clients = {}
            for kind, values in _clusters(folder, ranked).items():
                cluster = stack.enter_context(running("grpc", values))
                clients[kind] = await stack.enter_async_context(AsyncClient(cluster.endpoint))
                await play(clients[kind], [{"prompt": "Hello", "max_tokens": 16}])
            for streams in STREAMS:
                cases = _cases()
                for number in range(bench.rounds(_ROUNDS)):
                    texts = bench.prompts.take((number + 1) * streams)[-streams:]
                    for case in cases:
                        await _play(clients[case.kind], case, texts, _TOKENS if not bench.quick else _TOKENS // 4)
                    bench.say(f"{streams} streams, round {number + 1} of {bench.rounds(_ROUNDS)}")
                for bar in _bars(streams, cases):
                    yield bar


def _clusters(folder: Path, ranked: Path) -> dict[str, dict[str, Any]]:
    vocabulary = {
        "drafter.options.draft_vocabulary": drafter.VOCABULARY,
        "drafter.options.draft_vocabulary_file": str(ranked),
    }
    ngram = {"drafter.kind": "ngram", "policy.name": f"fixed:{drafter.BLOCK_DRAFTS}"}
    return {"dflash2": {**drafter.settings(folder), **vocabulary}, "ngram": ngram}


async def _play(client: AsyncClient, case: Case, texts: list[str], tokens: int) -> None:
    options = {**case.options, "max_tokens": tokens}
    requests = [{"messages": [{"role": "user", "content": text}], **options} for text in texts]
    done = await play(client, requests)
    case.rates.append(done.decode_rate)
    for answer in done.answers:
        case.steps += answer.result.stats.steps
        case.tokens += answer.result.stats.committed


def _bars(streams: int, cases: list[Case]) -> list[Bar]:
    plain = {case.temperature: case.rates for case in cases if not case.k}
    bars = []
    for case in cases:
        gain = stats.ratio(case.rates, plain[case.temperature]).value
        note = f"acceptance length {case.tokens / case.steps:.2f}, {gain:.2f} of plain decoding"
        name = f"{streams} stream{'s' * (streams > 1)}, {case.name}"
        rates = {"rates": case.rates}
        bars.append(Bar.of(name, stats.median(case.rates), ">=", None, unit="tokens/s", note=note, samples=rates))
    return bars
