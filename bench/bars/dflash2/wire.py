"""What carrying feature rows and drafts between processes costs at 32 streams: its share of the engine's step.

Everything between the verifier and its drafter that is neither's computing: gathering rows and making the message (the
verifier's own count), and of the time that steps wait for drafts what the drafter did not compute.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bench import drafter
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import metric, running
from bench.load import play
from kadence import AsyncClient
from kadence.internal import common_pb2, drafter_pb2, drafter_pb2_grpc
from services.runtime.channels import connect

MINUTES = 1
_STREAMS, _TOKENS, _STEPS = 32, 192, 60


@dataclass(frozen=True)
class Totals:
    """Counters of both services, since their starts."""

    steps: float
    step_seconds: float
    ask_seconds: float
    wait_seconds: float
    rows: float
    drafts: float
    compute_seconds: float

    @classmethod
    async def read(cls, client: AsyncClient) -> Totals:
        """As the metrics tell now."""
        status = await client.status()

        def read() -> Totals:
            def verifier(name: str) -> float:
                return metric(status, "verifier", f"kadence_{name}")

            return cls(
                verifier("engine_step_seconds_count"),
                verifier("engine_step_seconds_sum"),
                verifier("drafter_ask_seconds_total"),
                verifier("drafter_wait_seconds_total"),
                verifier("drafter_feature_rows_total"),
                verifier("spec_decode_num_drafts_total"),
                metric(status, "drafter", "kadence_drafter_compute_seconds_sum"),
            )

        return await asyncio.to_thread(read)

    def less(self, earlier: Totals) -> Totals:
        """What happened since `earlier`."""
        return Totals(*(getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__))


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """The share, while all streams decode; and the width of the rows that are asked for."""
    folder = bench.checkpoint()
    with running("grpc", drafter.settings(folder, model__dtype="bfloat16")) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            messages = [[{"role": "user", "content": text}] for text in bench.prompts.take(_STREAMS)]
            requests = [{"messages": each, "max_tokens": _TOKENS, "ignore_eos": True} for each in messages]
            playing = asyncio.create_task(play(client, requests))
            await _all_decode(client, playing)
            before = after = await Totals.read(client)
            while after.steps - before.steps < bench.rounds(_STEPS):
                assert not playing.done(), "the streams ended too early"
                await asyncio.sleep(0.2)
                after = await Totals.read(client)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            width = await _width(client)
    spent = after.less(before)
    bench.say(f"{spent.steps:.0f} steps, {spent.drafts / spent.steps:.1f} drafts each")
    carried = spent.ask_seconds + max(0.0, spent.wait_seconds - spent.compute_seconds)
    parts = {
        "step": spent.step_seconds,
        "asking": spent.ask_seconds,
        "waiting": spent.wait_seconds,
        "drafter computing": spent.compute_seconds,
    }
    told = ", ".join(f"{name} {1000 * seconds / spent.steps:.1f} ms" for name, seconds in parts.items())
    full = spent.drafts / spent.steps > 0.9 * _STREAMS
    yield Bar(
        f"serialisation and transport, {_STREAMS} streams",
        100 * carried / spent.step_seconds if full else None,
        "<=",
        10,
        unit="% of the step",
        note=f"{told}; {spent.rows / spent.steps:.0f} rows a step",
        samples=dict(vars(spent)),
    )
    hidden = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"])
    yield Bar.count("values of a feature row beyond its width h", width - hidden, hidden)


async def _all_decode(client: AsyncClient, playing: asyncio.Task[object]) -> None:
    """Until every stream runs and no prompt is left to be computed."""
    computed = -1.0
    while not playing.done():
        status = await client.status()
        verifier = next(replica for replica in status.replicas if replica.kind == "verifier")
        now = await asyncio.to_thread(metric, status, "verifier", "kadence_prompt_tokens_total")
        if verifier.running == _STREAMS and now == computed:
            return
        computed = now
        await asyncio.sleep(1.0)
    await playing  # raises what went wrong
    raise AssertionError("the streams were never all there at once")


async def _width(client: AsyncClient) -> int:
    """Width of the rows that the drafter asks for."""
    address = next(replica.address for replica in (await client.status()).replicas if replica.kind == "drafter")
    caller = common_pb2.Description()
    async with connect(drafter_pb2_grpc.DrafterServiceStub, address) as stub:
        answer = await stub.DescribeDrafter(drafter_pb2.DescribeDrafterRequest(caller=caller), timeout=10)
    return int(answer.drafter.feature_width)
