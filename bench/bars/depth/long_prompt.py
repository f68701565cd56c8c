"""A prompt of 4,000 tokens that comes while 16 streams run: how much longer their gaps are while it is computed.

In turn: the streams alone, then with the prompt, then alone again, since gaps grow with the streams' contexts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.reference import Reference
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient
from services.model.fetch import resolve

MINUTES = 4
_STREAMS, _PROMPT, _ROUNDS, _ALONE_SECONDS = 16, 4_000, 6, 3.0
_TOKENS = 1_500  # more than a stream gets to produce
_STRIDE = 101  # every round's prompt is a new one from its first token on
CASES: tuple[tuple[str, dict[str, Any]], ...] = (("plain decoding", {"max_draft_tokens": 0}), ("with drafts", {}))


@dataclass
class Gaps:
    """Gaps between chunks, by what went on when they ended."""

    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    """Seconds from the long prompt to its first token."""


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per way of decoding, and the long prompt's own time to first token."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    ids = reference.prompt_ids("\n".join(bench.prompts.take(48)))
    ids *= -(-(_PROMPT + 2 * _ROUNDS * _STRIDE) // len(ids))
    length = _PROMPT if not bench.quick else _PROMPT // 4
    long_prompts = iter([ids[number * _STRIDE :][:length] for number in range(2 * _ROUNDS)])
    texts = bench.prompts.take(_STREAMS)
    values = {"policy.name": "fixed:7", "drafter.kind": "ngram", "verifier.kv_tokens": 65_536}
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            for name, options in CASES:
                gaps = Gaps()
                for number in range(bench.rounds(_ROUNDS)):
                    await _round(client, texts, options, next(long_prompts), gaps)
                    bench.say(f"{name}, round {number + 1}: first token after {gaps.firsts[-1]:.1f} s")
                for bar in _bars(name, gaps, length):
                    yield bar


def _bars(name: str, gaps: Gaps, length: int) -> list[Bar]:
    beside, alone = ([stats.quantile(gaps, 0.95) for gaps in rounds] for rounds in (gaps.beside, gaps.alone))
    a, b = (1000 * stats.median(each).value for each in (beside, alone))
    longest = max(max(each) for each in gaps.beside)
    note = f"{a:.0f} ms and {b:.0f} ms over {len(beside)} rounds, longest gap {1000 * longest:.0f} ms"
    samples = {"beside": gaps.beside, "alone": gaps.alone}
    first = stats.median(gaps.firsts)
    return [
        Bar.of(
            f"p95 gap beside a long prompt, {name}",
            stats.ratio(beside, alone),
            "<=",
            4,
            unit="x",
            note=note,
            samples=samples,
        ),
        Bar.of(f"time to first token of the long prompt, {name}", first, "<=", None, unit="s", note=f"{length} tokens"),
    ]


async def _round(
    client: AsyncClient, texts: list[str], options: dict[str, Any], long_prompt: list[int], gaps: Gaps
) -> None:
    async with _streams(client, texts, options) as take:
        await asyncio.sleep(_ALONE_SECONDS)
        alone = take()
        sent = time.perf_counter()
        async with client.stream(prompt_token_ids=long_prompt, max_tokens=1, ignore_eos=True) as stream:
            async for _ in stream:
                break
        gaps.firsts.append(time.perf_counter() - sent)
        gaps.beside.append(take())
        await asyncio.sleep(_ALONE_SECONDS)
        gaps.alone.append(alone + take())


@asynccontextmanager
async def _streams(
    client: AsyncClient, texts: list[str], options: dict[str, Any]
) -> AsyncIterator[Callable[[], list[float]]]:
    """The streams once all of them decode; the function takes the gaps that ended since its last call."""
    seen: list[float] = []
    begun = asyncio.Barrier(len(texts) + 1)

    async def one(text: str) -> None:
        messages = [{"role": "user", "content": text}]
        async with client.stream(messages=messages, max_tokens=_TOKENS, ignore_eos=True, **options) as stream:
            last = 0.0
            async for _ in stream:
                now = time.perf_counter()
                if last:
                    seen.append(now - last)
                else:
                    await begun.wait()
                last = now

    def take() -> list[float]:
        taken, seen[:] = seen[:], []
        assert taken, "no stream went on"
        return taken

    tasks = [asyncio.create_task(one(text)) for text in texts]
    try:
        await begun.wait()
        await asyncio.sleep(0.5)  # what had gathered meanwhile is read at once
        seen.clear()
        yield take
        failed = [task for task in tasks if task.done()]
        assert not failed, f"{len(failed)} streams ended before the end"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
