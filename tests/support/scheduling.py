"""A scheduler in this process, and the raw client calls that tests make."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kadence.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from services.runtime.channels import connect
from services.scheduler.config import PolicyConfig, SchedulerConfig
from services.scheduler.service import SchedulerService
from tests.support.fake_verifier import FakeVerifier

_TURNS = 200
"""That `until` gives at least."""


@dataclass
class Result:
    """What one Generate stream brought."""

    started: inference_pb2.Started | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None
    chunks: int = 0

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        assert self.finished is None, "a message after the last"
        event = response.WhichOneof("event")
        if event == "started":
            assert self.started is None and self.chunks == 0
            self.started = response.started
        elif event == "chunk":
            assert self.started is not None
            assert response.chunk.token_ids
            self.chunks += 1
            self.token_ids += response.chunk.token_ids
            self.logprobs += response.chunk.logprobs
            self.text += response.chunk.text
        else:
            self.finished = response.finished
            self.text += response.finished.text

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return types_pb2.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_")


@dataclass
class Cluster:
    """A running scheduler."""

    service: SchedulerService
    stub: Any
    inner: str
    """Where replicas attach."""

    async def generate(self, request: inference_pb2.GenerateRequest, seconds: float = 20.0) -> Result:
        """One whole answer; raises APIError."""
        result = Result()
        async for response in self.stub.Generate(request, timeout=seconds):
            result.take(response)
        return result

    async def answers(self, request: inference_pb2.GenerateRequest, seconds: float = 20.0) -> list[Result]:
        """All answers of one request; raises APIError."""
        return (await self.events(request, seconds))[0]

    async def events(
        self, request: inference_pb2.GenerateRequest, seconds: float = 20.0
    ) -> tuple[list[Result], list[inference_pb2.GenerateResponse]]:
        """All answers, and the messages that brought them."""
        results, seen = [Result() for _ in range(request.sampling.n or 1)], []
        async for response in self.stub.Generate(request, timeout=seconds):
            seen.append(response)
            event = response.WhichOneof("event")
            for result in results if event == "started" else [results[getattr(response, event).index]]:
                result.take(response)
        return results, seen

    async def status(self) -> inference_pb2.GetStatusResponse:
        return await self.stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=5)

    async def states(self) -> dict[str, str]:
        """Replica id to state, without the scheduler."""
        return {r.replica_id: r.state for r in (await self.status()).replicas if r.kind != "scheduler"}

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value now; 0 if there is none."""
        return self.service._metrics.registry.get_sample_value(name, labels) or 0.0


def ask(prompt: str | None = "hello", *, ids: list[int] | None = None, **fields: Any) -> inference_pb2.GenerateRequest:
    """A request; `fields` that SamplingOptions knows go there."""
    names = {f.name for f in types_pb2.SamplingOptions.DESCRIPTOR.fields}
    sampling = types_pb2.SamplingOptions(**{k: v for k, v in fields.items() if k in names})
    rest = {k: v for k, v in fields.items() if k not in names}
    if ids is not None:
        rest["prompt_token_ids"] = ids
    elif prompt is not None and "messages" not in rest:
        rest["prompt"] = prompt
    return inference_pb2.GenerateRequest(sampling=sampling, **rest)


@asynccontextmanager
async def scheduler(folder: Path, transport: str = "grpc", **overrides: Any) -> AsyncIterator[Cluster]:
    """A scheduler for the tiny tokenizer with short patience; replicas may attach by `transport`."""
    # Without the metrics and HTTP ports, whose servers take a part of a second to stop.
    settings: dict[str, Any] = {"attach_wait_seconds": 0.5, "metrics_port": -1, "http_port": -1, **overrides}
    config = SchedulerConfig(
        model={"path": str(folder)}, policy=PolicyConfig(name=settings.pop("policy", "fixed:7")), **settings
    )
    name = "scheduler" if transport == "inproc" else None
    service = SchedulerService(config, inproc_name=name)
    address = await service.start()
    try:
        async with connect(inference_pb2_grpc.InferenceServiceStub, address) as stub:
            yield Cluster(service, stub, f"inproc://{name}" if name else address)
    finally:
        await service.drain(0)


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits until `condition()`, which may be a coroutine, is true."""
    deadline = asyncio.get_running_loop().time() + seconds
    for turn in itertools.count():
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        # A machine that stood still has used up the time, and nobody else had a turn in it.
        assert turn < _TURNS or asyncio.get_running_loop().time() < deadline, "timed out"
        await asyncio.sleep(0.005)


async def settled(cluster: Cluster, verifier: FakeVerifier) -> None:
    """Nothing is left anywhere."""
    await until(lambda: not verifier.running and cluster.service._dispatcher.in_flight == 0)
    assert cluster.service._dispatcher.running == cluster.service._dispatcher.queued == 0
    assert all(link.outstanding == 0 for link in cluster.service._control._links.values())


def says(verifier: FakeVerifier, ids: list[int]) -> None:
    """Makes it answer `ids` to everything."""
    verifier.script = lambda submit: ids
