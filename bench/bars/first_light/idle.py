"""What a cluster that nobody asks costs: CPU time of all its processes, as a share of one core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psutil

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from kadence import AsyncClient

MINUTES = 1
_SETTLE_SECONDS, _SECONDS = 3, 15
# "Next to none" in numbers; Ray's own daemons poll, and are counted with the services.
CASES = (("grpc", "three processes", 2.0), ("ray", "on local Ray, its daemons included", 10.0))


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """A bar per way of running the services, after a little work has warmed them up."""
    for transport, name, limit in CASES:
        with running(transport, {"drafter.kind": "ngram"}) as cluster:
            async with AsyncClient(cluster.endpoint) as client:
                await play(client, [{"prompt": text, "max_tokens": 8} for text in bench.prompts.take(4)])
            await asyncio.sleep(_SETTLE_SECONDS)
            seconds = _SECONDS if not bench.quick else 3
            before = _times(cluster.processes())
            bench.say(f"{name}: watching {len(before)} processes for {seconds} s")
            await asyncio.sleep(seconds)
            after = _times(cluster.processes())
        shares = {
            f"{what} ({pid})": 100 * (after[pid, what] - spent) / seconds
            for (pid, what), spent in before.items()
            if (pid, what) in after
        }
        note = ", ".join(f"{who} {share:.1f}" for who, share in sorted(shares.items(), key=lambda item: -item[1])[:4])
        yield Bar(f"idle {name}", sum(shares.values()), "<=", limit, unit="% of a core", note=note, samples=shares)


def _times(processes: list[psutil.Process]) -> dict[tuple[int, str], float]:
    """CPU seconds so far by (pid, what it runs)."""
    found = {}
    for process in processes:
        try:
            times = process.cpu_times()
            found[process.pid, _what(process)] = times.user + times.system
        except psutil.Error:  # ended meanwhile
            continue
    return found


def _what(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else words[0].rpartition("/")[2] if words else ""
    return module or process.name()
