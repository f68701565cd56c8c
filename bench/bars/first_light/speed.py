"""Plain decoding against `transformers` generate() at its best setting, in turn, on the same prompts and lengths.

Ours is the whole path: client, gRPC, scheduler, and the verifier in the same process ("inproc"). Theirs is the bare
call in a process of its own. Whoever is not measured sleeps.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import Round, play
from bench.reference import Generated, Setting
from bench.remote import WAITS, Remote, remote
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient
from services.model.fetch import resolve

MINUTES = 4
_TRIAL_TOKENS = 20
_CLEARLY = 1.03


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    streams: int
    tokens: int
    rounds: int
    limit: float
    aim: float | None


CASES = (
    Case("one stream", 1, 64, 14, 1.3, None),
    Case("16 streams", 16, 48, 8, 1.3, 1.7),
)


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per case: the ratio of decode rates, ours to theirs."""
    folder = resolve(DEFAULT_MODEL, allow_fetch=True)
    with ExitStack() as stack:
        ours = stack.enter_context(running("inproc", {"policy.name": "off", "drafter.kind": "ngram"}))
        theirs = {wait: stack.enter_context(remote(folder, wait)) for wait in WAITS}
        async with AsyncClient(ours.endpoint) as client:
            for case in CASES:
                yield await _compare(bench, case, client, theirs)


async def _compare(bench: Bench, case: Case, client: AsyncClient, theirs: dict[str, Remote]) -> Bar:
    some = next(iter(theirs.values()))
    batches = [
        [some.call("prompt_ids", prompt) for prompt in bench.prompts.take(case.streams * (i + 1))[-case.streams :]]
        for i in range(bench.rounds(case.rounds))
    ]
    wait, setting, trials = _best(bench, case, theirs, batches[0])
    await _ours(client, batches[0], 8)
    mine: list[Round] = []
    reference: list[Generated] = []
    for number, batch in enumerate(batches, 1):
        mine.append(await _ours(client, batch, case.tokens))
        reference.append(theirs[wait].call("generate", batch, case.tokens, setting, False))
        bench.say(
            f"{case.name}, round {number} of {len(batches)}: {mine[-1].decode_rate:.1f} and "
            f"{reference[-1].decode_rate:.1f} tokens/s"
        )
    a, b = [r.decode_rate for r in mine], [r.decode_rate for r in reference]
    whole = stats.ratio([r.whole_rate for r in mine], [r.whole_rate for r in reference])
    note = (
        f"tokens/s: inproc {stats.median(a).value:.1f}, transformers {stats.median(b).value:.1f} ({setting.dtype}, "
        f"{setting.attention}, {setting.threads} threads, {wait}); with prefill {whole.value:.2f}"
    )
    samples = {"ours": a, "theirs": b, "whole_ratio": whole.value, "trials": trials}
    return Bar.of(case.name, stats.ratio(a, b), ">=", case.limit, unit="x", aim=case.aim, note=note, samples=samples)


async def _ours(client: AsyncClient, batch: list[list[int]], tokens: int) -> Round:
    return await play(client, [dict(prompt_token_ids=ids, max_tokens=tokens, ignore_eos=True) for ids in batch])


def _best(
    bench: Bench, case: Case, theirs: dict[str, Remote], batch: list[list[int]]
) -> tuple[str, Setting, dict[str, float]]:
    """Their fastest setting: dtype with attention first, then threads, then how threads wait.

    What comes first is given up only for something clearly faster: threads that spin lose most when disturbed.
    """
    trials: dict[str, float] = {}

    def fastest(choices: list[tuple[str, Setting]]) -> tuple[str, Setting]:
        best, best_rate = choices[0], 0.0
        for wait, setting in choices:
            name = f"{setting.dtype} {setting.attention} {setting.threads} threads, {wait}"
            if name not in trials:
                runs = [theirs[wait].call("generate", batch, _TRIAL_TOKENS, setting, False) for _ in range(3)]
                trials[name] = max(run.decode_rate for run in runs)  # the first also warms up
                bench.say(f"{case.name}, transformers with {name}: {trials[name]:.1f} tokens/s")
            if trials[name] > _CLEARLY * best_rate:
                best, best_rate = (wait, setting), trials[name]
        return best

    cores = len(os.sched_getaffinity(0))
    waits = list(theirs)
    pairs = itertools.product(("bfloat16", "float32"), ("sdpa", "eager"))
    wait, setting = fastest([(waits[0], Setting(dtype, attention, cores)) for dtype, attention in pairs])
    counts = dict.fromkeys((cores, max(1, cores // 2), 1))
    wait, setting = fastest([(wait, replace(setting, threads=threads)) for threads in counts])
    wait, setting = fastest([(wait, setting) for wait in waits])
    return wait, setting, trials
