"""64 streams on KV pages for 16: all of them end, with the answers of a cluster that has room, and no page stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import idle_verifier, metric, running
from bench.load import Answer, play
from bench.reference import Reference
from bench.ties import judge
from deploy.config import DEFAULT_MODEL
from kadence import APIError, AsyncClient, ReplicaStatus
from services.model.fetch import resolve

MINUTES = 3
_STREAMS, _TOKENS = 64, 48
_TIMES = 4  # so many times the pages would be needed to run all at once
_PAGE = 16


@dataclass(frozen=True)
class Outcome:
    """What came of all streams, and the verifier when they had ended."""

    answers: list[Answer | APIError]
    verifier: ReplicaStatus
    preemptions: float

    @property
    def firsts(self) -> list[float]:
        """Seconds to the first token."""
        return [answer.arrivals[0][0] for answer in self.answers if isinstance(answer, Answer)]


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Ends, ids, pages left, time to first token."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    prompts = [
        reference.prompt_ids(text) for text in bench.prompts.take(_STREAMS if not bench.quick else _STREAMS // 4)
    ]
    pages = sorted((-(-(len(ids) + _TOKENS) // _PAGE) for ids in prompts), reverse=True)
    room = _PAGE * sum(pages[: len(pages) // _TIMES])
    pressed = await _play(bench, prompts, {"verifier.kv_tokens": room, "verifier.page_size": _PAGE})
    free = await _play(bench, prompts, {})
    failed = [answer for answer in pressed.answers if not _complete(answer)]
    note = f"{room} tokens of KV, {sum(pages) * _PAGE} needed at once; pre-empted {pressed.preemptions:.0f} times"
    note += f"; first failure: {failed[0]}" if failed else ""
    yield Bar.count("streams that did not end well", len(failed), len(prompts), note=note)
    differ = near = compared = 0
    for ids, ours, theirs in zip(prompts, pressed.answers, free.answers, strict=True):
        if isinstance(ours, Answer) and isinstance(theirs, Answer):
            compared += 1
            found = judge(reference, ids, list(ours.result.token_ids), list(theirs.result.token_ids))
            differ += found is not None
            near += found is not None and found.near
    note = f"float32, near ties {near}; pre-empted {pressed.preemptions:.0f} and {free.preemptions:.0f} times"
    yield Bar.count("answers unlike those of a cluster with room", differ - near, compared, note=note)
    yield Bar.count("KV pages in use at the end", pressed.verifier.kv_pages_used, pressed.verifier.kv_pages_total)
    for name, outcome in (("pressed", pressed), ("with room", free)):
        p95 = stats.quantile(outcome.firsts, 0.95) if outcome.firsts else None
        median = f"median {stats.median(outcome.firsts).value:.1f} s" if outcome.firsts else ""
        samples = {"seconds": outcome.firsts}
        yield Bar(f"time to first token, p95, {name}", p95, unit="s", note=median, samples=samples)


def _complete(answer: Answer | APIError) -> bool:
    return isinstance(answer, Answer) and len(answer.result.token_ids) == _TOKENS


async def _play(bench: Bench, prompts: list[list[int]], values: dict[str, Any]) -> Outcome:
    """All streams at once."""
    fixed = {"model.dtype": "float32", "policy.name": "fixed:7", "drafter.kind": "ngram", "verifier.max_num_seqs": 64}
    with running("grpc", {**fixed, **values}) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            answers = await asyncio.gather(*(_one(client, ids) for ids in prompts))
            verifier = await idle_verifier(client)
            preemptions = metric(await client.status(), "verifier", "kadence_num_preemptions_total")
    bench.say(f"{len(answers)} streams on {verifier.kv_pages_total} pages, pre-empted {preemptions:.0f} times")
    return Outcome(answers, verifier, preemptions)


async def _one(client: AsyncClient, ids: list[int]) -> Answer | APIError:
    try:
        done = await play(client, [{"prompt_token_ids": ids, "max_tokens": _TOKENS, "ignore_eos": True}])
    except ExceptionGroup as group:
        (error,) = group.exceptions
        if not isinstance(error, APIError):
            raise
        return error
    return done.answers[0]
