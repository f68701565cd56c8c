"""What verifying costs: the time of a step with 1 + 7 rows per request against one with a single row.

A step here is what the engine's thread does for it: plan the batch, run the target, choose every row's token. Contexts
are real prompts with their answers' length, about 200 tokens, in paged KV.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

import torch

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.reference import Reference
from deploy.config import DEFAULT_MODEL
from services.model.fetch import resolve
from services.model.probs import RowLaw, draw
from services.verifier import batch
from services.verifier.paged_kv import PageList, PagePool, allocate_caches
from services.verifier.target import Target

MINUTES = 1
_CONTEXT = 200
_ROUNDS = 48
_PAGES, _PAGE = 512, 16
_CHUNK = 512
SHAPES = ((1, 1), (1, 8), (16, 1), (16, 8))


class Stand:
    """A target with the contexts of 16 requests in its KV."""

    def __init__(self, prompts: list[list[int]]) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._target = Target(resolve(DEFAULT_MODEL, allow_fetch=True), "auto")
        self._target.prepare(1024)
        arch, self.dtype = self._target.arch, self._target.dtype
        self._caches = allocate_caches(arch, _PAGES, _PAGE, self.dtype)
        self._layout = batch.Layout(_PAGES, _PAGE, arch.num_kv_heads, self.dtype)
        self._pool = PagePool(_PAGES, _PAGE)
        self._requests = [self._fill(ids) for ids in prompts]

    def _fill(self, ids: list[int]) -> tuple[list[int], PageList]:
        pages = self._pool.open()
        assert self._pool.reserve(pages, len(ids) + 8)
        self._run([batch.Work(ids, 0, 1, pages.pages)])
        return ids, pages

    def step(self, requests: int, rows: int) -> float:
        """Seconds of one step in which each of the first `requests` verifies `rows` rows."""
        works = [batch.Work(ids[:rows], len(ids), rows, pages.pages) for ids, pages in self._requests[:requests]]
        begun = time.perf_counter()
        self._run(works)
        return time.perf_counter() - begun

    def _run(self, works: list[batch.Work]) -> None:
        forward, _ = batch.plan(works, self._layout)
        with torch.inference_mode():
            logits = self._target.forward(forward, self._caches)
            draw(logits, [RowLaw(0.0, 0, 1.0, 0, 0)] * len(logits))


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Two bars: one request, and sixteen."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    many = 16
    contexts = []
    for i, prompt in enumerate(bench.prompts.take(many)):
        ids = reference.prompt_ids(prompt)
        wanted = _CONTEXT - 24 + 3 * i  # requests are of different lengths
        contexts.append((ids * (wanted // len(ids) + 1))[:wanted])
    stand = Stand(contexts)
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in SHAPES}
    for number in range(bench.rounds(_ROUNDS) + 3):
        for shape in SHAPES:
            seconds = stand.step(*shape)
            if number >= 3:  # kernels are compiled per shape
                times[shape].append(seconds)
    bench.say("; ".join(f"{r} x {q}: {1000 * stats.median(t).value:.1f} ms" for (r, q), t in times.items()))
    for name, requests, limit in (("8 rows to 1, one request", 1, 1.5), ("8 rows to 1, 16 requests", 16, 3.2)):
        many_rows, one_row = times[requests, 8], times[requests, 1]
        a, b = stats.median(many_rows).value, stats.median(one_row).value
        yield Bar.of(
            name,
            stats.ratio(many_rows, one_row),
            "<=",
            limit,
            unit="x",
            note=f"{1000 * a:.1f} ms and {1000 * b:.1f} ms, {str(stand.dtype).removeprefix('torch.')}",
            samples={"8 rows": many_rows, "1 row": one_row},
        )
