"""A replica's permanent stream to the scheduler: register, report, receive policy; reconnects for ever."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from kadence.errors import APIError, UnavailableError
from kadence.internal import common_pb2, control_pb2, control_pb2_grpc
from services.runtime.channels import connect
from services.runtime.heartbeat import alive

_LOAD_SECONDS = 0.1  # load reports are coalesced to ten a second
_REGISTER_SECONDS = 5.0
_BACKOFF = (0.1, 2.0)  # first and longest wait between tries

_log = logging.getLogger(__name__)


class Attachment:
    """Keeps the replica attached. All methods and callbacks belong to the event loop that called `start`.

    `register()` is asked anew at each try. `on_policy`, `on_drafters` get each message of that kind (epochs are for
    the caller to compare); `on_lost` is told when a registered stream ends.
    """

    def __init__(
        self,
        scheduler_address: str,
        register: Callable[[], control_pb2.Register],
        *,
        on_policy: Callable[[control_pb2.Policy], None] | None = None,
        on_drafters: Callable[[control_pb2.Peers], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        max_outcome_batches: int = 256,
    ) -> None:
        self._address = scheduler_address
        self._register = register
        self._on_policy = on_policy
        self._on_drafters = on_drafters
        self._on_lost = on_lost
        self._outcomes: deque[control_pb2.OutcomeBatch] = deque(maxlen=max_outcome_batches)
        self._load: control_pb2.Load | None = None
        self._draining = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._heartbeat_seconds = 1.0
        self.attached = asyncio.Event()
        """Set while registered."""
        self.dropped_outcomes = 0
        """Outcomes that found the buffer full."""

    async def start(self) -> None:
        """Begins to attach, in the background."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="attachment")

    def report_load(self, load: control_pb2.Load) -> None:
        """Sends `load`, or a newer one, within a tenth of a second; never waits."""
        self._load = load
        self._wake.set()

    def report_outcomes(self, batch: control_pb2.OutcomeBatch) -> None:
        """Queues evidence; when the queue is full the oldest batch is dropped and counted."""
        if len(self._outcomes) == self._outcomes.maxlen:
            self.dropped_outcomes += len(self._outcomes[0].outcomes)
        self._outcomes.append(batch)
        self._wake.set()

    def drain(self) -> None:
        """Tells the scheduler, now and after each reconnect, to send no new work."""
        self._draining = True
        self._wake.set()

    async def close(self) -> None:
        """Detaches; safe to call twice, or without `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        first, longest = _BACKOFF
        wait = first
        while True:
            try:
                await self._attach_once()
            except APIError as error:
                _log.warning("scheduler %s: %s", self._address, error.message)
            except Exception:
                _log.exception("attachment failed")
            if self.attached.is_set():
                self.attached.clear()
                wait = first
                if self._on_lost is not None:
                    self._on_lost()
            await asyncio.sleep(wait * random.uniform(0.8, 1.2))
            wait = min(longest, wait * 2)

    async def _attach_once(self) -> None:
        """One stream from dial to loss."""
        async with connect(control_pb2_grpc.ControlServiceStub, self._address) as stub:
            call = stub.Attach(self._requests())
            try:
                await self._await_registered(call)
                async for response in alive(call, lambda: self._heartbeat_seconds, f"scheduler {self._address}"):
                    self._receive(response)
            finally:
                call.cancel()
        raise UnavailableError("the scheduler ended the stream")

    async def _await_registered(self, call: AsyncIterator[control_pb2.AttachResponse]) -> None:
        try:
            async with asyncio.timeout(_REGISTER_SECONDS):
                first = await anext(call)
        except TimeoutError:
            raise UnavailableError(f"not registered within {_REGISTER_SECONDS:.0f} s") from None
        except StopAsyncIteration:
            raise UnavailableError("the scheduler ended the stream before registering us") from None
        if first.WhichOneof("event") != "registered":
            raise UnavailableError("the scheduler's first message was not a registration")
        self._heartbeat_seconds = first.registered.heartbeat_seconds or 1.0
        self.attached.set()
        self._wake.set()
        _log.info("attached to scheduler %s (%s)", self._address, first.registered.scheduler_id)

    def _receive(self, response: control_pb2.AttachResponse) -> None:
        event = response.WhichOneof("event")
        if event == "policy" and self._on_policy is not None:
            self._on_policy(response.policy)
        elif event == "drafters" and self._on_drafters is not None:
            self._on_drafters(response.drafters)

    async def _requests(self) -> AsyncIterator[control_pb2.AttachRequest]:
        """Register, then whatever is due: reports, at most one load a tenth of a second, heartbeats."""
        clock = asyncio.get_running_loop().time
        yield control_pb2.AttachRequest(register=self._register())
        said_draining = False
        sent_load: Any = None
        load_at, beat_sent = clock(), float("-inf")
        sequence = 0
        while True:
            if self._draining and not said_draining:
                said_draining = True
                yield control_pb2.AttachRequest(draining=control_pb2.Draining())
            while self._outcomes:
                yield control_pb2.AttachRequest(outcomes=self._outcomes.popleft())
            if self._load is not sent_load and clock() >= load_at:
                sent_load, load_at = self._load, clock() + _LOAD_SECONDS
                yield control_pb2.AttachRequest(load=sent_load)
            if clock() >= beat_sent + self._heartbeat_seconds:
                sequence, beat_sent = sequence + 1, clock()
                yield control_pb2.AttachRequest(heartbeat=common_pb2.Heartbeat(sequence=sequence))
            beat_at = beat_sent + self._heartbeat_seconds  # the interval is known only once registered
            due = min(beat_at, load_at) if self._load is not sent_load else beat_at
            await self._sleep(due - clock())

    async def _sleep(self, seconds: float) -> None:
        """Until something new is to be sent, or `seconds` passed."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
