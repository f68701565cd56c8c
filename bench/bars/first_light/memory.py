"""The verifier's memory: its peak when all of its KV is really written, and whether thousands of requests leave any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import idle_verifier, pid_of, resident, running
from bench.load import play
from bench.reference import Reference
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient, ReplicaStatus
from services.model.fetch import resolve

MINUTES = 4
_KV_TOKENS = 32_768
# Of the flatness test: KV that the first requests fill for good, since full pages are kept as a cache.
_FLAT_KV_TOKENS = 4_096
# Together 32,736 tokens; the first request is still there when the last one comes.
_LONG_PROMPT, _SHORT_PROMPT, _SHORTS = 8_000, 448, 48
_FULL = 0.9  # share of the pages that must be in use at once to call the KV full
_REQUESTS, _BLOCK, _AT_ONCE = 2_000, 100, 32
_WARM_UP = 0.25  # share of the requests before memory has to be flat
_KINDS = ("verifier", "scheduler", "drafter")
MIB, GIB = 2**20, 2**30


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Pages at the end, flatness of every service, then the verifier's peak with full KV."""
    ids = Reference(resolve(DEFAULT_MODEL, allow_fetch=True)).prompt_ids("\n".join(bench.prompts.take(48)))
    values = {"model.dtype": "bfloat16", "policy.name": "fixed:7", "drafter.kind": "ngram"}
    with running("grpc", {**values, "verifier.kv_tokens": _FLAT_KV_TOKENS}) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            for bar in await _flat(bench, client, ids):
                yield bar
    # Prompts take whole steps, else the first requests are gone before the last ones have come.
    full = {"verifier.kv_tokens": _KV_TOKENS, "verifier.max_prefill_tokens": 512}
    with running("grpc", {**values, **full}) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            yield await _peak(bench, client, ids)


async def _flat(bench: Bench, client: AsyncClient, ids: list[int]) -> list[Bar]:
    """Short requests of many shapes; resident sets after every block of them."""
    status = await client.status()
    pids = {kind: pid_of(status, kind) for kind in _KINDS}
    points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    blocks = bench.rounds(_REQUESTS // _BLOCK)
    for block in range(1, blocks + 1):
        await play(client, [_short(ids, block * _BLOCK + i) for i in range(_BLOCK)], _AT_ONCE)
        for kind, pid in pids.items():
            points[kind].append((block * _BLOCK, resident(pid) / MIB))
        sizes = ", ".join(f"{kind} {points[kind][-1][1]:.0f} MiB" for kind in _KINDS)
        bench.say(f"{block * _BLOCK} of {blocks * _BLOCK} requests: {sizes}")
    bars = []
    for kind in _KINDS:
        settled = [(done / 1000, size) for done, size in points[kind] if done > _WARM_UP * blocks * _BLOCK]
        estimate = stats.slope(settled)
        note = f"{settled[0][1]:.0f} MiB after warm-up, {settled[-1][1]:.0f} after {blocks * _BLOCK} requests"
        name = f"{kind} growth per 1,000 requests"
        bars.append(Bar.of(name, estimate, "<=", 4, unit="MiB", note=note, samples={"mib": points[kind]}))
    verifier = await idle_verifier(client)
    used, total = verifier.kv_pages_used, verifier.kv_pages_total
    return [Bar.count("KV pages still in use at the end", used, total), *bars]


def _short(ids: list[int], number: int) -> dict[str, Any]:
    """A request of 4 to 35 prompt tokens and 1 to 8 new ones, greedy or sampled."""
    start = number * 7 % (len(ids) - 40)
    return {
        "prompt_token_ids": ids[start : start + 4 + number % 32],
        "max_tokens": 1 + number % 8,
        "temperature": 0.8 * (number % 2),
        "seed": number,
    }


async def _verifier(client: AsyncClient) -> ReplicaStatus:
    return next(replica for replica in (await client.status()).replicas if replica.kind == "verifier")


async def _peak(bench: Bench, client: AsyncClient, ids: list[int]) -> Bar:
    """Fills the KV: pages that were never written cost nothing, which would flatter.

    One request as long as the model takes them, which also makes the largest temporary tensors, and many shorter ones.
    """
    requests = [_filling(ids, _LONG_PROMPT, 160)]
    requests += [_filling(ids[7 * i :], _SHORT_PROMPT, 64) for i in range(_SHORTS)]
    most, total, told = 0, 1, 0.0
    playing = asyncio.create_task(play(client, requests))
    while not playing.done():
        verifier = await _verifier(client)
        most, total = max(most, verifier.kv_pages_used), verifier.kv_pages_total
        if most >= told + 0.1 * total:
            told = most
            bench.say(f"filling the KV: {most} of {total} pages")
        await asyncio.wait([playing], timeout=0.2)
    await playing
    peak = resident(verifier.pid, "VmHWM") / GIB
    note = f"bfloat16, {most} of {total} pages of {_KV_TOKENS // total} tokens were in use at once"
    full = most >= _FULL * total
    return Bar("verifier's largest resident set", peak if full else None, "<=", 2, unit="GiB", note=note)


def _filling(ids: list[int], prompt: int, tokens: int) -> dict[str, Any]:
    prompt_ids = (ids * (prompt // len(ids) + 1))[:prompt]
    return {"prompt_token_ids": prompt_ids, "max_tokens": tokens, "ignore_eos": True, "max_draft_tokens": 0}
