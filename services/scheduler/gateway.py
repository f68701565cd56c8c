"""Serves InferenceService: asks come in, answers stream out, each with exactly one end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kadence.v1 import inference_pb2, inference_pb2_grpc
from services.scheduler import messages
from services.scheduler.dispatch import Dispatcher
from services.scheduler.fleet import Fleet, Replica
from services.scheduler.generation import Intake, Piece
from services.scheduler.publisher import Publisher


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The public face over gRPC. `ourselves()` is how the scheduler itself appears in the status."""

    def __init__(
        self,
        intake: Intake,
        dispatcher: Dispatcher,
        fleet: Fleet,
        publisher: Publisher,
        ourselves: Callable[[], Replica],
    ) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._publisher = publisher
        self._ourselves = ourselves
        self._loop = asyncio.get_running_loop()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the answers of one request."""
        generation = await self._intake.open(messages.ask(request), context.time_remaining())
        # Not only in `events`: a cancelled call may leave this generator suspended until it is collected.
        context.add_done_callback(lambda _: generation.close())
        yield messages.started(generation.request, generation.model, generation.attempt)
        async for event in generation.events():
            if isinstance(event, Piece):
                yield messages.chunk(event)
            else:
                yield messages.finished(event, len(generation.prompt_token_ids))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The one model."""
        return messages.models(self._intake.limits(), self._fleet.drafter_kind())

    async def GetStatus(self, request: inference_pb2.GetStatusRequest, context: Any) -> inference_pb2.GetStatusResponse:
        """A snapshot for people."""
        replicas = [self._ourselves(), *self._fleet.all(self._loop.time())]
        return inference_pb2.GetStatusResponse(
            policy=self._publisher.policy.name,
            policy_epoch=str(self._publisher.epoch),
            replicas=[messages.replica_status(replica) for replica in replicas],
            requests_in_flight=self._dispatcher.in_flight,
            requests_queued=self._dispatcher.queued,
        )
