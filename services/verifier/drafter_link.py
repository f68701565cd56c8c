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
from services.model.projection import ProjectionWeights
from services.runtime.channels import connect
from services.runtime.heartbeat import alive
from services.verifier import projection_transfer

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
    projection: ProjectionWeights | None = None
    """What makes those rows."""
    window: int = 0
    """Tokens that it looks back; 0 is without bound. Of the rows it needs those of the last window - 1."""
    kv_tokens: int = 0
    """Tokens of context that all sessions may hold together; 0 is without bound."""
    max_rows: int = 0
    """Most feature rows of a message; 0 is without bound."""
    max_message_bytes: int = 0
    signals: tuple[str, ...] = ()
    supports_ratio: bool = False
    """Whether its drafts carry q."""


@dataclass(frozen=True)
class Side:
    """The verifier's side of the handshake."""

    description: common_pb2.Description
    num_layers: int
    hidden_size: int


class DrafterLink:
    """Lives on the event loop; `connection`, `send`, `replies` and `suspend` may be used from the engine's thread."""

    def __init__(self, ours: Callable[[], Side], heartbeat_seconds: float, on_change: Callable[[], None]) -> None:
        self._ours = ours
        self._heartbeat_seconds = heartbeat_seconds
        self._on_change = on_change  # told on the event loop when `state` may be another
        self._told = asyncio.Event()
        self._problem = ""
        self._peers: list[tuple[str, str]] = []
        self._changed = asyncio.Event()
        self._outbox: asyncio.Queue[drafter_pb2.DraftRequest] = asyncio.Queue()
        self._suspended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._generation = 0
        self._projection: ProjectionWeights | None = None  # the last one fetched
        self._projection_fingerprint = ""
        self.connection: Connection | None = None
        """None while there is nobody to ask."""
        self.replies: queue.SimpleQueue[drafter_pb2.DraftResponse | None] = queue.SimpleQueue()
        """Answers in order of arrival; None when a connection was lost."""

    @property
    def state(self) -> tuple[str, str]:
        """Replica id of the drafter in use, and why the one tried last can never be; "" is none."""
        connection = self.connection
        return ("", self._problem) if connection is None else (connection.replica_id, "")

    async def connected(self) -> None:
        """Waits for a drafter. Raises ConfigError as soon as one does not fit."""
        while self.connection is None:
            if self._problem:
                raise ConfigError(self._problem)
            self._told.clear()
            await self._told.wait()

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

    def send(self, request: drafter_pb2.DraftRequest, generation: int) -> None:
        """Queues a message, from any thread."""
        assert self._loop is not None, "send before start"
        self._loop.call_soon_threadsafe(self._put, request, generation)

    def _put(self, request: drafter_pb2.DraftRequest, generation: int) -> None:
        if generation == self._generation:  # else its sessions died with their connection
            self._outbox.put_nowait(request)

    def suspend(self) -> None:
        """Gives the drafter up, from any thread; it is tried again with back-off, off the step path."""
        assert self._loop is not None, "suspend before start"
        self.connection = None
        self._loop.call_soon_threadsafe(self._suspended.set)

    async def _run(self) -> None:
        wait, turn = _BACKOFF[0], 0
        while True:
            if not self._peers:
                self._tell()  # whoever did not fit is gone
                self._changed.clear()
                await self._changed.wait()
                continue
            replica_id, address = self._peers[turn % len(self._peers)]
            generation = self._generation
            problem = ""
            try:
                await self._serve(replica_id, address)
            except ConfigError as error:
                problem = str(error)
                _log.warning("drafter %s: %s", address, error)
            except APIError as error:
                _log.warning("drafter %s: %s", address, error)
            except Exception:
                _log.exception("drafter link failed")
            finally:
                self.connection = None
            self._tell(problem)
            if self._generation > generation and not self._suspended.is_set():
                wait = _BACKOFF[0]
            turn += 1
            await self._pause(wait * random.uniform(0.8, 1.2))
            wait = min(_BACKOFF[1], wait * 2)

    def _tell(self, problem: str = "") -> None:
        self._problem = problem
        self._told.set()
        self._on_change()

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
            ours = self._ours()
            answer = await stub.DescribeDrafter(
                drafter_pb2.DescribeDrafterRequest(caller=ours.description), timeout=_DESCRIBE_SECONDS
            )
            theirs = answer.drafter
            check_drafter(ours, theirs)
            projection = await self._project(stub, ours, theirs) if theirs.feature_width else None
            self._suspended.clear()
            self._changed.clear()
            while not self._outbox.empty():  # meant for an earlier connection
                self._outbox.get_nowait()
            call = stub.Draft(self._requests())
            self._generation += 1
            self.connection = Connection(
                generation=self._generation,
                replica_id=replica_id,
                max_sessions=theirs.max_sessions,
                max_draft_tokens=theirs.max_draft_tokens,
                rows=theirs.feature_fingerprint if theirs.feature_width else "",
                projection=projection,
                window=theirs.window,
                kv_tokens=theirs.kv_tokens,
                max_rows=theirs.max_rows,
                max_message_bytes=theirs.max_message_bytes,
                signals=tuple(theirs.signals),
                supports_ratio=theirs.supports_ratio,
            )
            self._tell()
            _log.info("drafting with %s at %s (%s)", replica_id, address, theirs.drafter_kind)
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

    async def _project(
        self, stub: drafter_pb2_grpc.DrafterServiceStub, ours: Side, theirs: common_pb2.Description
    ) -> ProjectionWeights:
        """What makes the drafter's feature rows; fetched unless it is what the last one handed over."""
        if self._projection is None or self._projection_fingerprint != theirs.feature_fingerprint:
            self._projection = await projection_transfer.fetch(stub, theirs, ours.hidden_size)
            self._projection_fingerprint = theirs.feature_fingerprint
        return self._projection

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


def check_drafter(ours: Side, drafter: common_pb2.Description) -> None:
    """Raises ConfigError naming both values if the drafter was not made for this target."""
    target = ours.description
    pairs = (
        ("vocabulary", drafter.vocab_size, target.vocab_size),
        ("target fingerprint", drafter.model_fingerprint, target.model_fingerprint),
    )
    for what, theirs, its in pairs:
        if theirs and theirs != its:
            raise ConfigError(f"the drafter's {what} is {theirs}, the target's is {its}")
    if not drafter.feature_width:
        return
    taps, last = list(drafter.taps), ours.num_layers - 2
    if not taps or taps != sorted(set(taps)) or taps[0] < 0 or taps[-1] > last:
        # The last layer is left out: its output is handed out normalised by some engines and raw by others.
        raise ConfigError(
            f"the drafter's taps are {taps}; layers of the target that can be tapped, in ascending order, are 0..{last}"
        )
    if not drafter.feature_fingerprint:
        raise ConfigError(f"the drafter wants feature rows of width {drafter.feature_width} and names no fingerprint")
