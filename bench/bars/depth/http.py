"""Streams through the HTTP API against the gRPC SDK: each client a process of its own, in turn.

All read every chunk of the same greedy answers from the same cluster. Plain decoding, so that every token is a chunk.
The bar is on a client that reads the JSON of each event. The `openai` package is told beside it: it computes on the
cores that the cluster needs, more than the server does for HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.rivals import rival
from kadence import AsyncClient

MINUTES = 4
_STREAMS, _TOKENS, _ROUNDS = 16, 64, 16


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Goodput, and whether both were told the same."""
    with running("grpc", {"policy.name": "off", "drafter.kind": "ngram"}) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            http = next(r.http_address for r in (await client.status()).replicas if r.kind == "scheduler")
        texts = bench.prompts.take(_STREAMS)
        rates: dict[str, list[float]] = {"gRPC SDK": [], "HTTP": [], "openai package": []}
        chunks = dict.fromkeys(rates, 0)
        wrong = 0
        with ExitStack() as stack:
            addresses = {"gRPC SDK": cluster.endpoint, "HTTP": http, "openai package": http}
            rivals = {name: stack.enter_context(rival(name, address)) for name, address in addresses.items()}
            for each in rivals.values():
                each.play(texts, 8)
            for number in range(rounds := bench.rounds(_ROUNDS)):
                # Whoever is first in a round is last in the next.
                for name in list(rivals)[:: -1 if number % 2 else 1]:
                    played = rivals[name].play(texts, _TOKENS)
                    rates[name].append(played.rate)
                    chunks[name] += played.chunks
                    wrong += played.tokens != _STREAMS * _TOKENS
                said = ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
                bench.say(f"round {number + 1} of {rounds}: {said} tokens/s")
    note = "; ".join(
        f"{name} {stats.median(values).value:.1f} tokens/s, {chunks[name] / rounds / _STREAMS:.1f} chunks an answer"
        for name, values in rates.items()
    )
    for name, limit in (("HTTP", 0.90), ("openai package", None)):
        ratio = stats.ratio(rates[name], rates["gRPC SDK"])
        shown = f"{name} against gRPC, {_STREAMS} streams"
        yield Bar.of(shown, ratio, ">=", limit, unit="x", note=note, samples=dict(rates))
    yield Bar.count("rounds with another number of tokens", wrong, len(rates) * rounds)
