"""The verifier's gRPC face to schedulers: one Decode stream each, one message per step for all its requests."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any

from kadence.errors import APIError, UnavailableError
from kadence.internal import common_pb2, verifier_pb2, verifier_pb2_grpc
from services.runtime.heartbeat import alive
from services.verifier import messages
from services.verifier.engine import Engine
from services.verifier.outcomes import Update
from services.verifier.request import FinishReason, Terminal

_log = logging.getLogger(__name__)

_Outbox = asyncio.Queue[verifier_pb2.DecodeResponse | None]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Owns no tensors. Everything here runs on the event loop."""

    def __init__(self, engine: Engine, description: common_pb2.Description, heartbeat: float, grace: float) -> None:
        self._engine = engine
        self._description = description
        self._heartbeat_seconds = heartbeat
        self._grace_seconds = grace
        self._outboxes: dict[str, _Outbox] = {}
        self._live: dict[str, dict[str, int]] = {}  # owner -> request id -> attempt
        self._orphans: set[asyncio.Task[None]] = set()
        self.draining = False
        """New requests are refused while set."""

    async def DescribeVerifier(
        self, request: verifier_pb2.DescribeVerifierRequest, context: Any
    ) -> verifier_pb2.DescribeVerifierResponse:
        """What this replica is."""
        return verifier_pb2.DescribeVerifierResponse(verifier=self._description)

    async def Decode(
        self, requests: AsyncIterator[verifier_pb2.DecodeRequest], context: Any
    ) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        """Takes work, yields one message per step; when the stream ends its requests have the grace period to live."""
        owner = uuid.uuid4().hex
        outbox: _Outbox = asyncio.Queue()
        self._outboxes[owner] = outbox
        self._live[owner] = {}
        reader = asyncio.create_task(self._read(requests, owner, outbox))
        try:
            async for response in self._write(outbox):
                yield response
            await reader  # its failure is the call's
        finally:
            reader.cancel()
            del self._outboxes[owner]
            self._park(owner)

    def deliver(self, step: int, updates: list[Update]) -> None:
        """Sends a step's updates to the schedulers that own the requests."""
        by_owner: dict[str, verifier_pb2.DecodeResponse] = {}
        for update in updates:
            if update.owner not in by_owner:
                by_owner[update.owner] = verifier_pb2.DecodeResponse(step=step)
            by_owner[update.owner].updates.append(messages.update_message(update))
            live = self._live.get(update.owner, {})
            if update.terminal is not None and live.get(update.request_id) == update.attempt:
                del live[update.request_id]
        for owner, response in by_owner.items():
            if owner in self._outboxes:
                self._outboxes[owner].put_nowait(response)

    async def close(self) -> None:
        """Forgets parked requests' timers."""
        for task in self._orphans:
            task.cancel()

    async def _read(self, requests: AsyncIterator[verifier_pb2.DecodeRequest], owner: str, outbox: _Outbox) -> None:
        try:
            async for request in alive(requests, lambda: self._heartbeat_seconds, "the scheduler"):
                for submit in request.submits:
                    self._submit(submit, owner, outbox)
                for stop in request.stops:
                    self._engine.stop(stop.stamp.request_id, stop.stamp.attempt)
        finally:
            outbox.put_nowait(None)

    async def _write(self, outbox: _Outbox) -> AsyncIterator[verifier_pb2.DecodeResponse]:
        sequence = 0
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    response = await outbox.get()
            except TimeoutError:
                sequence += 1
                response = verifier_pb2.DecodeResponse(heartbeat=common_pb2.Heartbeat(sequence=sequence))
            if response is None:
                return
            yield response

    def _submit(self, submit: verifier_pb2.Submit, owner: str, outbox: _Outbox) -> None:
        try:
            if self.draining or self._engine.broken:
                raise UnavailableError("this verifier takes no more requests", request_id=submit.stamp.request_id)
            request = messages.request_from(
                submit, owner, self._description.vocab_size, self._description.max_model_len
            )
        except APIError as error:
            terminal = Terminal(FinishReason.FAILED, code=error.code, message=error.message)
            update = verifier_pb2.RequestUpdate(stamp=submit.stamp, terminal=messages.terminal_message(terminal))
            outbox.put_nowait(verifier_pb2.DecodeResponse(updates=[update]))
            return
        live = self._live[owner]
        live[request.request_id] = max(request.attempt, live.get(request.request_id, 0))
        self._engine.submit(request)

    def _park(self, owner: str) -> None:
        """The stream is gone: its requests run on for the grace period, in case a newer attempt takes them over."""
        if not self._live[owner]:
            del self._live[owner]
            return
        count = len(self._live[owner])
        _log.warning("a scheduler was lost with %d requests; kept for %.0f s", count, self._grace_seconds)
        task = asyncio.create_task(self._free_later(owner))
        self._orphans.add(task)
        task.add_done_callback(self._orphans.discard)

    async def _free_later(self, owner: str) -> None:
        await asyncio.sleep(self._grace_seconds)
        for request_id, attempt in self._live.pop(owner).items():
            self._engine.stop(request_id, attempt)
