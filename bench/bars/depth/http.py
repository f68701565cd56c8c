"""Streams through the HTTP API with the `openai` package against the gRPC SDK: each client a process, in turn.

Both read every chunk of the same greedy answers from the same cluster. Plain decoding, so that every token is a chunk.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.rivals import rival
from kadence import AsyncClient

MINUTES = 3
_STREAMS, _TOKENS, _ROUNDS = 16, 64, 12


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Goodput, and whether both were told the same."""
    with running("grpc", {"policy.name": "off"}) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            http = next(r.http_address for r in (await client.status()).replicas if r.kind == "scheduler")
        texts = bench.prompts.take(_STREAMS)
        rates: dict[str, list[float]] = {"openai package": [], "gRPC SDK": []}
        chunks = dict.fromkeys(rates, 0)
        wrong = 0
        with rival("openai package", http) as one, rival("gRPC SDK", cluster.endpoint) as other:
            rivals = {"openai package": one, "gRPC SDK": other}
            for each in rivals.values():
                each.play(texts, 8)
            for number in range(rounds := bench.rounds(_ROUNDS)):
                # Whoever is second in a round is first in the next.
                for name in list(rivals)[:: -1 if number % 2 else 1]:
                    played = rivals[name].play(texts, _TOKENS)
                    rates[name].append(played.rate)
                    chunks[name] += played.chunks
                    wrong += played.tokens != _STREAMS * _TOKENS
                said = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
                bench.say(f"round {number + 1} of {rounds}: {said} tokens/s")
    mine, theirs = rates.values()
    note = f"{stats.median(mine).value:.1f} and {stats.median(theirs).value:.1f} tokens/s; "
    note += ", ".join(f"{name} {count / rounds / _STREAMS:.1f} chunks an answer" for name, count in chunks.items())
    name = f"HTTP against gRPC, {_STREAMS} streams"
    yield Bar.of(name, stats.ratio(mine, theirs), ">=", 0.90, unit="x", note=note, samples=dict(rates))
    yield Bar.count("rounds with another number of tokens", wrong, 2 * rounds)
