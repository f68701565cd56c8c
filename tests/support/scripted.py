"""A real gRPC server whose InferenceService answers by script, for tests of the SDK and the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from kadence import _status
from kadence.errors import APIError
from kadence.v1 import inference_pb2, inference_pb2_grpc, types_pb2

# One step of a script: a message to send, seconds to wait, or how the call fails.
Step = inference_pb2.GenerateResponse | float | APIError
Script = Sequence[Step]


def started(request_id: str = "r-1", seed: int = 7, prompt: Sequence[int] = (1, 2)) -> inference_pb2.GenerateResponse:
    message = inference_pb2.Started(request_id=request_id, model="tiny", prompt_token_ids=prompt, seed=seed)
    message.rule = types_pb2.RULE_MATCH
    return inference_pb2.GenerateResponse(started=message)


def chunk(text: str, *token_ids: int, index: int = 0) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(chunk=inference_pb2.Chunk(token_ids=token_ids, text=text, index=index))


def finished(
    reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_STOP, text: str = "", stop_match: str = "", index: int = 0
) -> inference_pb2.GenerateResponse:
    stats = types_pb2.GenerationStats(
        steps=4, drafted=12, verified=10, accepted=6, committed=10, k_hist=[1, 0, 2, 1], cached_tokens=3
    )
    message = inference_pb2.Finished(reason=reason, text=text, stop_match=stop_match, stats=stats, index=index)
    return inference_pb2.GenerateResponse(finished=message)


HELLO: Script = (started(), chunk("Hel", 10, 11), chunk("", 12), chunk("lo ", 13), finished(text="you"))


@dataclass
class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers the n-th Generate with the n-th script (the last one for ever), and remembers what it saw."""

    scripts: list[Script] = field(default_factory=lambda: [HELLO])
    queries: list[APIError] = field(default_factory=list)
    """Errors that ListModels and GetStatus raise first, one a call."""
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client gives a call up."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        try:
            for step in script:
                if isinstance(step, APIError):
                    await fail(context, step)
                elif isinstance(step, int | float):
                    await asyncio.sleep(step)
                else:
                    yield step
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        if self.queries:
            await fail(context, self.queries.pop(0))
        model = inference_pb2.ModelInfo(name="tiny", max_model_len=64, vocab_size=100, drafter_kind="ngram")
        return inference_pb2.ListModelsResponse(models=[model])

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetStatusResponse:
        if self.queries:
            await fail(context, self.queries.pop(0))
        verifier = inference_pb2.ReplicaStatus(
            replica_id="v-1",
            kind="verifier",
            address="127.0.0.1:5001",
            state="ready",
            serves="tiny",
            pid=42,
            drafter_problem="the drafter's vocabulary is 5, the target's is 6",
            running=2,
            kv_pages_used=3,
            kv_pages_total=8,
            stats=types_pb2.GenerationStats(steps=2, committed=5),
        )
        return inference_pb2.GetStatusResponse(
            policy="fixed:7", policy_epoch="b:1", replicas=[verifier], requests_in_flight=2, requests_queued=1
        )


async def fail(context: grpc.aio.ServicerContext, error: APIError) -> None:
    code, message, details = _status.encode(error)
    trailing = ((_status.DETAILS_KEY, details),)
    await context.abort(grpc.StatusCode[code], message, trailing_metadata=trailing)


@asynccontextmanager
async def serving(servicer: Servicer, port: int = 0) -> AsyncIterator[str]:
    """Serves on the loopback and yields "host:port"."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)
