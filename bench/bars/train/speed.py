"""One greedy stream with the drafter against plain decoding, by task, prompt by prompt in turn.

Plain decoding has a cluster of its own that knows no drafter. Several lengths of drafts are tried; the bars are those
of the one length that brings most over all tasks. What follows an answer's first repeated 16-gram counts in neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from bench import drafter, stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import Answer, play
from kadence import AsyncClient
from training.acceptance import TOKENS
from training.conversations import before_loop, spread

MINUTES = 13
_PROMPTS = 12  # of each task
LENGTHS = (2, 3, 5, 7)
LIMIT, AIM = 1.25, 2.0
_SHORTEST = 8  # tokens of an answer that has a rate

Rates = dict[str, dict[int, list[float]]]
"""Tokens per second by task and draft length, 0 being plain decoding; the same prompts for each."""


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per task at the best length, and a line per task for each other."""
    options = {"drafter.options.draft_vocabulary": drafter.VOCABULARY}
    clusters = {
        "drafts": drafter.settings(bench.checkpoint()) | options,
        "plain": {"drafter.kind": "none", "policy.name": "off"},
    }
    rates: Rates = {task: {k: [] for k in (0, *LENGTHS)} for task in bench.prompts.by_task}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, values in clusters.items():
            cluster = stack.enter_context(running("grpc", values))
            clients[name] = await stack.enter_async_context(AsyncClient(cluster.endpoint))
            await play(clients[name], [{"prompt": "Hello", "max_tokens": 16}])
        count = bench.rounds(_PROMPTS)
        prompts = {task: spread(texts, count) for task, texts in bench.prompts.by_task.items()}
        for number, task in itertools.product(range(count), prompts):
            for text in prompts[task][number : number + 1]:
                for k, rate in (await _each(clients, text)).items():
                    rates[task][k].append(rate)
            bench.say(f"prompt {number + 1} of {count}, {task}")
    best = best_length(rates)
    for k in sorted(LENGTHS, key=lambda k: (k != best, k)):
        for task, by_k in rates.items():
            yield _bar(task, k, by_k, k == best)


async def _each(clients: dict[str, AsyncClient], text: str) -> dict[int, float]:
    """The prompt's rate without drafts and with each length of them; {} if the answer is too short for one."""
    found = {}
    for k in (0, *LENGTHS):
        request: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
        request |= {"temperature": 0.0, "max_draft_tokens": k}
        (answer,) = (await play(clients["drafts" if k else "plain"], [request])).answers
        if before_loop(answer.result.token_ids) < _SHORTEST:
            return {}
        found[k] = rate_of(answer)
    return found


def rate_of(answer: Answer) -> float:
    """Tokens per second behind the first chunk, until the answer ends or begins to loop."""
    kept, (begun, first) = before_loop(answer.result.token_ids), answer.arrivals[0]
    have = list(itertools.accumulate(count for _, count in answer.arrivals))
    last = next(place for place, tokens in enumerate(have) if tokens >= kept)
    return (have[last] - first) / (answer.arrivals[last][0] - begun)


def best_length(rates: Rates) -> int:
    """The draft length whose gain over plain decoding has the highest geometric mean over tasks."""

    def gain(k: int) -> float:
        return sum(math.log(stats.ratio(by_k[k], by_k[0]).value) for by_k in rates.values() if by_k[0])

    return max(LENGTHS, key=gain)


def _bar(task: str, k: int, by_k: dict[int, list[float]], best: bool) -> Bar:
    name = f"{task}, fixed:{k}"
    if not by_k[0]:
        return Bar(name, None, ">=", LIMIT, note="no answer was long enough")
    note = f"{stats.median(by_k[k]).value:.1f} and plain {stats.median(by_k[0]).value:.1f} tokens/s"
    gain, samples = stats.ratio(by_k[k], by_k[0]), {"drafts": by_k[k], "plain": by_k[0]}
    limit, aim = (LIMIT, AIM) if best else (None, None)
    return Bar.of(name, gain, ">=", limit, unit="x", aim=aim, note=note, samples=samples)
