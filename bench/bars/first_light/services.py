"""What the cut into services costs: three processes against one, in turn, and the time it adds to a step.

Both clusters are up all the time; the one that is not measured sleeps. Drafts are on, so that every service works.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import Answer, play
from kadence import AsyncClient

MINUTES = 3
_STREAMS, _TOKENS, _ROUNDS = 16, 64, 9
_ALONE_TOKENS, _ALONE_ROUNDS = 64, 10


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Goodput at 16 streams, with a bar; added time per step at one stream, told."""
    values = {"policy.name": "fixed:7", "drafter.kind": "ngram"}
    with running("grpc", values) as three, running("inproc", values) as one:
        async with AsyncClient(three.endpoint) as apart, AsyncClient(one.endpoint) as together:
            for client in (apart, together):
                await play(client, _requests(bench.prompts.take(_STREAMS), 8))
            yield await _goodput(bench, apart, together)
            for bar in await _added(bench, apart, together):
                yield bar


async def _goodput(bench: Bench, apart: AsyncClient, together: AsyncClient) -> Bar:
    rates: tuple[list[float], list[float]] = ([], [])
    lengths: tuple[list[float], list[float]] = ([], [])
    requests = _requests(bench.prompts.take(_STREAMS), _TOKENS)
    for number in range(bench.rounds(_ROUNDS)):
        for side, client in enumerate((apart, together)):
            done = await play(client, requests)
            rates[side].append(done.whole_rate)
            lengths[side].append(_acceptance(done.answers))
        bench.say(f"round {number + 1}: {rates[0][-1]:.1f} and {rates[1][-1]:.1f} tokens/s at {_STREAMS} streams")
    note = (
        f"three processes {stats.median(rates[0]).value:.1f} tokens/s, inproc {stats.median(rates[1]).value:.1f}; "
        f"acceptance length {stats.median(lengths[0]).value:.2f} and {stats.median(lengths[1]).value:.2f}"
    )
    samples = {"three": rates[0], "inproc": rates[1], "acceptance_three": lengths[0], "acceptance_inproc": lengths[1]}
    name = f"three processes against inproc, {_STREAMS} streams"
    return Bar.of(name, stats.ratio(*rates), ">=", 0.90, unit="x", note=note, samples=samples)


async def _added(bench: Bench, apart: AsyncClient, together: AsyncClient) -> list[Bar]:
    """At one stream a chunk is a step, and both clusters take the same steps, since batches are the same."""
    steps: tuple[list[float], list[float]] = ([], [])
    for number, prompt in enumerate(bench.prompts.take(bench.rounds(_ALONE_ROUNDS)), 1):
        for side, client in enumerate((apart, together)):
            done = await play(client, _requests([prompt], _ALONE_TOKENS))
            steps[side].extend(1000 * seconds for seconds in done.answers[0].intervals)
        bench.say(f"one stream, answer {number}: {len(steps[0])} and {len(steps[1])} steps so far")
    samples = {"three_ms": steps[0], "inproc_ms": steps[1]}
    bars = []
    for name, share in (("median", 0.5), ("p95", 0.95)):
        estimate = stats.quantile_difference(steps[0], steps[1], share)
        ours, theirs = stats.quantile(steps[0], share), stats.quantile(steps[1], share)
        note = f"a step is {ours:.1f} ms in three processes, {theirs:.1f} inproc"
        bars.append(Bar.of(f"added time per step, one stream, {name}", estimate, "<=", None, unit="ms", note=note))
    bars[0].samples.update(samples)
    return bars


def _requests(prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": p}], "max_tokens": tokens, "ignore_eos": True} for p in prompts]


def _acceptance(answers: list[Answer]) -> float:
    each = [answer.result.stats for answer in answers]
    return sum(s.committed for s in each) / max(1, sum(s.steps for s in each))
