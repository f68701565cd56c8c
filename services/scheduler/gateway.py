"""Serves InferenceService: asks come in, answers stream out, each with exactly one end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kadence.errors import APIError, DeadlineExceededError, RequestCancelledError, UnavailableError
from kadence.v1 import inference_pb2, inference_pb2_grpc
from services.runtime import logs
from services.scheduler import messages
from services.scheduler.answer import Answer
from services.scheduler.dispatch import Dispatcher
from services.scheduler.fleet import Fleet, Replica
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.prompts import Prompts
from services.scheduler.publisher import Publisher
from services.scheduler.request import Limits
from services.scheduler.session import Finish, Session
from services.scheduler.tokenizer import Tokenizer

_SHORTEST_PAUSE = 0.002  # a timer is not worth less

_log = logging.getLogger(__name__)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The public face. `ourselves()` is how the scheduler itself appears in the status."""

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Tokenizer,
        limits: Callable[[], Limits],
        dispatcher: Dispatcher,
        fleet: Fleet,
        publisher: Publisher,
        metrics: SchedulerMetrics,
        ourselves: Callable[[], Replica],
        *,
        default_timeout: float,
        max_chunks_per_second: int,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._limits = limits
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._publisher = publisher
        self._metrics = metrics
        self._ourselves = ourselves
        self._default_timeout = default_timeout
        self._chunk_seconds = 1.0 / max_chunks_per_second
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Accepts nothing from now on; running answers go on."""
        self._closed = True

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams one answer."""
        began = self._loop.time()
        left = context.time_remaining()
        try:
            session = await self._accept(request, began)
        except APIError as error:
            self._metrics.refused(error)
            raise
        deadline = began + (self._default_timeout if left is None else left)
        timer = self._loop.call_at(deadline, session.end, DeadlineExceededError("the request's time was up"))
        # Not only in `finally`: a cancelled call may leave this generator suspended until it is collected.
        context.add_done_callback(lambda _: self._gone(session, deadline))
        try:
            yield messages.started(session.request, self._limits().model)
            while (piece := await session.take()) is not None:
                yield messages.chunk(*piece)
                if session.outcome is None:
                    await self._pause()
            yield self._finished(session)
        finally:
            timer.cancel()
            self._gone(session, deadline)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """The one model."""
        return messages.models(self._limits(), self._fleet.drafter_kind())

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

    async def _accept(self, message: inference_pb2.GenerateRequest, began: float) -> Session:
        if self._closed:
            raise UnavailableError("the scheduler is shutting down")
        self._dispatcher.check_room()
        request = await self._prompts.understand(messages.ask(message))
        logs.request_id.set(request.request_id)
        session = Session(request, Answer(self._tokenizer.detokenizer(), request.stop), began)
        self._dispatcher.add(session)
        return session

    async def _pause(self) -> None:
        """Lets a stream's next tokens gather for as long as keeps all streams together within their message rate."""
        seconds = self._dispatcher.running * self._chunk_seconds
        if seconds >= _SHORTEST_PAUSE:
            await asyncio.sleep(seconds)

    def _finished(self, session: Session) -> inference_pb2.GenerateResponse:
        outcome = session.outcome
        assert outcome is not None
        if not isinstance(outcome, Finish):
            outcome.request_id = session.request.request_id
            raise outcome
        match = session.answer.stop_match or ""
        if outcome.stop_token_id >= 0:
            match = self._tokenizer.token_text(outcome.stop_token_id)
        _log.info(
            "%s: %d prompt tokens, %d tokens in %.3f s",
            outcome.reason.name.lower(),
            len(session.request.prompt_token_ids),
            session.produced,
            self._loop.time() - session.accepted_at,
        )
        return messages.finished(session, outcome.reason, session.answer.finish(), match)

    def _gone(self, session: Session, deadline: float) -> None:
        """The call is over; if the request is not, its client went away or ran out of time."""
        late = self._loop.time() >= deadline
        session.end(DeadlineExceededError("the request's time was up") if late else RequestCancelledError("cancelled"))
