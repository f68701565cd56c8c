"""The verifier's stream to its drafter: dials, shakes hands, sends, receives; reconnects for ever with back-off."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kadence.errors import APIError, ConfigError
from kadence.internal import common_pb2, drafter_pb2, drafter_pb2_grpc
from services.runtime.channels import connect
from services.runtime.heartbeat import alive

_BACKOFF = (0.1, 5.0)  # first and longest wait between tries
_DESCRIBE_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Connection:
    """A live stream to a drafter that fits this target. `generation` counts connections: sessions die with theirs."""

    generation: int
    replica_id: str
    max_sessions: int
    max_draft_tokens: int
    rows: str = ""
    """Fingerprint of the fc and hidden_norm behind the feature rows it wants; "" wants none, as n-gram drafters."""


class DrafterLink:
    """Lives on the event loop; `connection`, `send`, `replies` and `suspend` may be used from the engine's thread."""

    def __init__(self, describe: Callable[[], common_pb2.Description], heartbeat_seconds: float) -> None:
        self._describe = describe
        self._heartbeat_seconds = heartbeat_seconds
        self._peers: list[tuple[str, str]] = []
        self._changed = asyncio.Event()
        self._outbox: asyncio.Queue[drafter_pb2.DraftRequest] = asyncio.Queue()
        self._suspended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._generation = 0
        self.connection: Connection | None = None
        """None while there is nobody to ask."""
        self.replies: queue.SimpleQueue[drafter_pb2.DraftResponse | None] = queue.SimpleQueue()
        """Answers in order of arrival; None when a connection was lost."""

    def start(self) -> None:
        """Begins to look for a drafter."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name="drafter-link")

    async def close(self) -> None:
        """Ends the stream; safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def set_peers(self, peers: list[tuple[str, str]]) -> None:
        """Drafters one may use, as (replica id, address); the current one is kept while it is among them."""
        if peers == self._peers:
            return
        self._peers = peers
        current = self.connection
        if current is None or current.replica_id not in {replica_id for replica_id, _ in peers}:
            self._changed.set()

    def send(self, request: drafter_pb2.DraftRequest) -> None:
        """Queues a message, from any thread."""
        assert self._loop is not None, "send before start"
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, request)

    def suspend(self) -> None:
        """Gives the drafter up, from any thread; it is tried again with back-off, off the step path."""
        assert self._loop is not None, "suspend before start"
        self.connection = None
        self._loop.call_soon_threadsafe(self._suspended.set)

    async def _run(self) -> None:
        wait, turn = _BACKOFF[0], 0
        while True:
            if not self._peers:
                self._changed.clear()
                await self._changed.wait()
                continue
            replica_id, address = self._peers[turn % len(self._peers)]
            generation = self._generation
            try:
                await self._serve(replica_id, address)
            except (APIError, ConfigError) as error:
                _log.warning("drafter %s: %s", address, error)
            except Exception:
                _log.exception("drafter link failed")
            finally:
                self.connection = None
            if self._generation > generation and not self._suspended.is_set():
                wait = _BACKOFF[0]
            turn += 1
            await self._pause(wait * random.uniform(0.8, 1.2))
            wait = min(_BACKOFF[1], wait * 2)

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _serve(self, replica_id: str, address: str) -> None:
        """One connection, from dial to loss."""
        async with connect(drafter_pb2_grpc.DrafterServiceStub, address) as stub:
            ours = self._describe()
            answer = await stub.DescribeDrafter(
                drafter_pb2.DescribeDrafterRequest(caller=ours), timeout=_DESCRIBE_SECONDS
            )
            check_drafter(ours, answer.drafter)
            self._suspended.clear()
            self._changed.clear()
            while not self._outbox.empty():  # meant for an earlier connection
                self._outbox.get_nowait()
            call = stub.Draft(self._requests())
            self._generation += 1
            self.connection = Connection(
                self._generation, replica_id, answer.drafter.max_sessions, answer.drafter.max_draft_tokens
            )
            _log.info("drafting with %s at %s (%s)", replica_id, address, answer.drafter.drafter_kind)
            watch = asyncio.create_task(self._until_unwanted(call.cancel))
            try:
                async for response in alive(call, lambda: self._heartbeat_seconds, f"drafter {address}"):
                    if response.step:
                        self.replies.put(response)
            finally:
                self.connection = None
                self.replies.put(None)
                watch.cancel()
                call.cancel()

    async def _until_unwanted(self, cancel: Callable[[], None]) -> None:
        """Cancels the call when the drafter was suspended or is no longer offered."""
        waits = [asyncio.create_task(event.wait()) for event in (self._suspended, self._changed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            cancel()
        finally:
            for task in waits:
                task.cancel()

    async def _requests(self) -> AsyncIterator[drafter_pb2.DraftRequest]:
        sequence = 0
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    request = await self._outbox.get()
            except TimeoutError:
                sequence += 1
                request = drafter_pb2.DraftRequest(heartbeat=common_pb2.Heartbeat(sequence=sequence))
            yield request


def check_drafter(target: common_pb2.Description, drafter: common_pb2.Description) -> None:
    """Raises ConfigError naming both values if the drafter was not made for this target."""
    pairs = (
        ("vocabulary", drafter.vocab_size, target.vocab_size),
        ("target fingerprint", drafter.model_fingerprint, target.model_fingerprint),
    )
    for what, theirs, ours in pairs:
        if theirs and theirs != ours:
            raise ConfigError(f"the drafter's {what} is {theirs}, the target's is {ours}")
    if drafter.feature_width:
        raise ConfigError(f"the drafter wants feature rows of width {drafter.feature_width}, this verifier makes none")
