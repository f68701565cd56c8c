"""Serves ControlService: replicas attach, report, and are told what to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kadence.errors import APIError, InvalidRequestError, UnavailableError
from kadence.internal import common_pb2, control_pb2, control_pb2_grpc
from services.runtime import logs
from services.runtime.heartbeat import alive
from services.scheduler import messages
from services.scheduler.dispatch import Dispatcher
from services.scheduler.fleet import Fleet, Replica
from services.scheduler.links import VerifierLink
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.publisher import Outbox, Publisher
from services.scheduler.session import Session

_REGISTER_SECONDS = 5.0
_CLOSING = "the scheduler is shutting down"

_log = logging.getLogger(__name__)


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Turns attached replicas into a fleet: links to verifiers, drafters for verifiers, policy for all."""

    def __init__(
        self,
        fleet: Fleet,
        publisher: Publisher,
        dispatcher: Dispatcher,
        metrics: SchedulerMetrics,
        describe: Callable[[], common_pb2.Description],
        heartbeat_seconds: float,
    ) -> None:
        self._fleet = fleet
        self._publisher = publisher
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._describe = describe
        self._heartbeat_seconds = heartbeat_seconds
        self._closed = False
        self._links: dict[str, VerifierLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().time

    async def Attach(
        self, request_iterator: AsyncIterator[control_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[control_pb2.AttachResponse]:
        """One replica's permanent stream."""
        logs.request_id.set("")  # a permanent stream works for no request
        register = await _first(request_iterator)
        if self._closed:
            raise UnavailableError(_CLOSING)
        replica = self._register(register)
        outbox = self._publisher.subscribe(replica.kind)
        reader = asyncio.create_task(self._read(replica, request_iterator, outbox), name=f"attached {replica.id}")
        # Not only in `finally`: a cancelled call may leave this generator suspended until it is collected.
        context.add_done_callback(lambda _: reader.cancel())
        try:
            yield messages.registered(self._describe().replica_id, self._heartbeat_seconds)
            async for message in outbox.messages(self._heartbeat_seconds):
                yield message
        finally:
            reader.cancel()

    def link_up(self) -> None:
        """A verifier takes requests now."""
        self._dispatcher.link_up()

    def link_down(self, link: VerifierLink, reason: str, sessions: list[Session]) -> None:
        """A verifier's requests must move; without its other stream too, it is lost."""
        self._dispatcher.link_down(link, reason, sessions)
        if not link.replica.attached and not link.ready:
            self._lose(link.replica, reason)

    async def close(self) -> None:
        """Ends every stream and link."""
        self._closed = True
        self._publisher.close(UnavailableError(_CLOSING))
        for link in list(self._links.values()):
            self._drop_link(link, _CLOSING)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _register(self, register: control_pb2.Register) -> Replica:
        replica, held = messages.replica(register)
        if not replica.address:
            raise InvalidRequestError.of("register.address", "is empty; an address the scheduler can dial")
        try:
            replaced = self._fleet.add(replica)
        except InvalidRequestError as error:
            _log.warning("refused %s %s at %s: %s", replica.kind, replica.id, replica.address, error.message)
            raise
        for old in replaced:
            link = self._links.get(old.id)
            if link is not None and old.id == replica.id:
                link.replica = replica  # the same process attached again; its requests never noticed
            elif link is not None:
                self._drop_link(link, f"{replica.id} took over its address")
        self._publisher.seed(held)
        if replica.kind == "verifier" and replica.id not in self._links:
            self._links[replica.id] = VerifierLink(
                replica, self, self._metrics, self._describe, self._heartbeat_seconds
            )
            self._dispatcher.attach(self._links[replica.id])
        _log.info("%s %s attached, at %s", replica.kind, replica.id, replica.address)
        self._changed(replica)
        return replica

    async def _read(self, replica: Replica, requests: AsyncIterator[control_pb2.AttachRequest], outbox: Outbox) -> None:
        """Takes reports until the stream ends, one way or another."""
        reason: APIError | None = None
        try:
            async for request in alive(requests, lambda: self._heartbeat_seconds, f"{replica.kind} {replica.id}"):
                self._report(replica, request)
        except APIError as error:
            reason = error
        finally:
            outbox.close(reason)
            self._publisher.unsubscribe(outbox)
            self._detached(replica, reason)

    def _report(self, replica: Replica, request: control_pb2.AttachRequest) -> None:
        event = request.WhichOneof("event")
        if event == "load":
            replica.load = messages.load(request.load)
        elif event == "draining" and replica.state == "ready":
            replica.state = "draining"
            _log.info("%s %s drains", replica.kind, replica.id)
            self._changed(replica)

    def _detached(self, replica: Replica, silence: APIError | None) -> None:
        """A stream ended. A verifier whose other stream still works gets the time of two heartbeats to attach again."""
        replica.attached = False
        link = self._links.get(replica.id)
        if silence is None and link is not None and link.ready and replica.state == "ready":
            asyncio.get_running_loop().call_later(2 * self._heartbeat_seconds, self._lose, replica, "it detached")
        else:
            self._lose(replica, silence.message if silence is not None else "it detached")

    def _lose(self, replica: Replica, reason: str) -> None:
        level = logging.INFO if replica.state == "draining" else logging.WARNING
        if not self._fleet.lose(replica, self._clock()):
            return  # it attached again meanwhile
        _log.log(level, "%s %s at %s: %s", replica.kind, replica.id, replica.address, reason)
        link = self._links.get(replica.id)
        if link is not None:
            self._drop_link(link, reason)
        self._changed(replica)

    def _drop_link(self, link: VerifierLink, reason: str) -> None:
        del self._links[link.replica.id]
        self._dispatcher.detach(link)
        task = asyncio.create_task(link.close(reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self, replica: Replica) -> None:
        if replica.kind == "drafter":
            self._publisher.set_drafters(self._fleet.live("drafter"))
        else:
            self._dispatcher.link_up()


async def _first(requests: AsyncIterator[control_pb2.AttachRequest]) -> control_pb2.Register:
    try:
        async with asyncio.timeout(_REGISTER_SECONDS):
            first = await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidRequestError.of("register", f"missing; it must come within {_REGISTER_SECONDS:.0f} s") from None
    if first.WhichOneof("event") != "register":
        raise InvalidRequestError.of("register", f"the first message was {first.WhichOneof('event')}")
    return first.register
