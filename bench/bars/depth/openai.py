"""The `openai` package, synchronous and asynchronous, against a cluster with the real model."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.openai_checks import CHECKS, Told, callers
from kadence import AsyncClient

MINUTES = 1


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One bar per client: how many checks fail."""
    # In float32, where batch shapes do not move a token, since answers are compared with each other.
    with running("grpc", {"model.dtype": "float32", "policy.name": "fixed:7", "drafter.kind": "ngram"}) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            http = next(r.http_address for r in (await client.status()).replicas if r.kind == "scheduler")
            told = await Told.ask(client)
            async with callers(http, told.chat.model) as kinds:
                for kind, caller in kinds.items():
                    failed = {}
                    for check in CHECKS:
                        try:
                            await check(caller, told)
                        except Exception as error:
                            failed[check.__name__] = traceback.format_exc()
                            bench.say(f"{kind} {check.__name__}: {type(error).__name__}: {error}")
                    note = f"failed: {', '.join(failed)}" if failed else ", ".join(c.__name__ for c in CHECKS)
                    name = f"checks that fail, {kind}"
                    yield Bar.count(name, len(failed), len(CHECKS), note=note, samples=failed)
