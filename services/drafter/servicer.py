"""Serves DrafterService: the handshake, and one stream of steps per verifier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kadence.errors import InvalidRequestError, UnsupportedError
from kadence.internal import common_pb2, drafter_pb2, drafter_pb2_grpc
from services.drafter.engine import Engine
from services.drafter.messages import from_answer, pieces, to_step
from services.drafter.methods import Traits, WireTensor
from services.drafter.session import Sessions
from services.runtime.heartbeat import alive, beat

_log = logging.getLogger(__name__)
_UNREAD = 16  # answers a verifier may leave unread before its next step has to wait

Outgoing = asyncio.Queue[drafter_pb2.DraftResponse | Exception | None]


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """`changed` is told after each step and each stream's end."""

    def __init__(
        self,
        engine: Engine,
        traits: Traits,
        projection: Sequence[WireTensor],
        description: common_pb2.Description,
        heartbeat_seconds: float,
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._traits = traits
        self._projection = projection
        self._description = description
        self._heartbeat_seconds = heartbeat_seconds
        self._changed = changed

    async def DescribeDrafter(
        self, request: drafter_pb2.DescribeDrafterRequest, context: Any
    ) -> drafter_pb2.DescribeDrafterResponse:
        """Refuses a caller that expects another kind."""
        expected, kind = request.caller.drafter_kind, self._traits.kind
        if expected and expected != kind:
            raise InvalidRequestError.of("caller.drafter_kind", f"is {expected}; this drafter is {kind}")
        return drafter_pb2.DescribeDrafterResponse(drafter=self._description)

    async def FetchProjection(
        self, request: drafter_pb2.FetchProjectionRequest, context: Any
    ) -> AsyncIterator[drafter_pb2.FetchProjectionResponse]:
        """What makes feature rows, piece by piece."""
        if not self._projection:
            raise UnsupportedError(f"drafter kind {self._traits.kind} takes no feature rows and has no projection")
        for tensor in self._projection:
            for piece in pieces(tensor):
                yield piece

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """Answers steps in their order, beats in between; the sessions end with the stream."""
        sessions = self._engine.new_sessions()
        outgoing: Outgoing = asyncio.Queue(_UNREAD)

        def send_beat(heartbeat: common_pb2.Heartbeat) -> None:
            if not outgoing.full():  # full of answers: signs of life enough
                outgoing.put_nowait(drafter_pb2.DraftResponse(heartbeat=heartbeat))

        tasks = [
            asyncio.create_task(self._read(request_iterator, sessions, outgoing)),
            asyncio.create_task(beat(send_beat, self._heartbeat_seconds)),
        ]
        try:
            while (item := await outgoing.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._engine.drop(sessions)
            self._changed()

    async def _read(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest], sessions: Sessions, outgoing: Outgoing
    ) -> None:
        end: Exception | None = None
        try:
            async for message in alive(aiter(requests), lambda: self._heartbeat_seconds, "the verifier"):
                answer = await self._engine.step(sessions, to_step(message, self._traits))
                if answer is not None:
                    await outgoing.put(from_answer(answer))
                self._changed()
        except Exception as error:
            _log.warning("draft stream ends with %d sessions: %s", len(sessions), error)
            end = error
        await outgoing.put(end)
