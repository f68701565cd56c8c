"""The in-process transport: servicers called in the same event loop, messages passed as they are, errors as over gRPC.

A message belongs to the receiver once sent: nobody changes it afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc

from kadence import _status
from kadence.errors import (
    APIError,
    DeadlineExceededError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from services.runtime import errors

SCHEME = "inproc://"
_BUFFER = 64  # messages in flight each way; gRPC's flow-control window does the same by bytes
_END = object()

_log = logging.getLogger(__name__)
_servers: dict[str, InprocServer] = {}


class InprocServer:
    """Servicers reachable as "inproc://name" inside this process; the shape GrpcServer has."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._servicers: dict[str, Any] = {}
        self._serving = False
        self._calls: set[InprocStream] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.address = SCHEME + name

    def add(self, register: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Adds a servicer under its full service name; `register` is not needed here."""
        self._servicers[name] = servicer

    async def start(self) -> str:
        """Makes the name reachable and returns its address."""
        assert self._name not in _servers, f"{self.address} is taken"
        _servers[self._name] = self
        self._serving = True
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """Whether new calls are taken."""
        self._serving = serving

    async def drain(self, grace: float) -> None:
        """Takes no new calls, gives running ones `grace` seconds, then ends them."""
        self._serving = False
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._idle.wait()
        for call in list(self._calls):
            call.end(UnavailableError(f"{self.address} was stopped"))
        if _servers.get(self._name) is self:
            del _servers[self._name]

    def opened(self, call: InprocStream) -> None:
        """Counts a running call."""
        self._calls.add(call)
        self._idle.clear()

    def closed(self, call: InprocStream) -> None:
        """Forgets an ended call."""
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()

    def method(self, path: str) -> Any:
        """The servicer's method for "/service/Method"; raises as a gRPC server answers."""
        _, service, method = path.split("/")
        if not self._serving:
            raise UnavailableError(f"{self.address} is stopping")
        if service not in self._servicers:
            raise UnsupportedError(f"{self.address} does not serve {service}")
        return getattr(self._servicers[service], method)


class InprocChannel:
    """What a generated stub builds its methods on."""

    def __init__(self, address: str) -> None:
        self._address = address

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Callable[..., Awaitable[Any]]:
        async def one(method: Any, request: Any, context: InprocContext) -> AsyncIterator[Any]:
            yield await method(request, context)

        async def call(request: Any, *, timeout: float | None = None, metadata: Any = None) -> Any:  # noqa: ASYNC109
            stream = InprocStream(self._address, path, request, timeout, metadata, around=one)
            return await anext(stream)

        return call

    def unary_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., InprocStream]:
        def call(request: Any, *, timeout: float | None = None, metadata: Any = None) -> InprocStream:
            return InprocStream(self._address, path, request, timeout, metadata)

        return call

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., InprocStream]:
        def call(requests: AsyncIterator[Any], *, timeout: float | None = None, metadata: Any = None) -> InprocStream:
            return InprocStream(self._address, path, _Pipe(), timeout, metadata, source=requests)

        return call


class InprocStream:
    """A running call as an async iterator of its responses."""

    def __init__(
        self,
        address: str,
        path: str,
        request: Any,
        timeout: float | None,
        metadata: Any,
        *,
        source: AsyncIterator[Any] | None = None,
        around: Callable[[Any, Any, InprocContext], AsyncIterator[Any]] | None = None,
    ) -> None:
        self._responses = _Pipe()
        self._context = InprocContext(timeout, metadata)
        self._server = _servers.get(address.removeprefix(SCHEME))
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        try:
            if self._server is None:
                raise UnavailableError(f"nothing serves {address}")
            method = self._server.method(path)
        except APIError as error:
            self._responses.close(error)
            return
        self._server.opened(self)
        answers = around(method, request, self._context) if around else method(request, self._context)
        self._tasks.append(asyncio.create_task(self._serve(answers)))
        if source is not None:
            self._tasks.append(asyncio.create_task(self._write(source, request)))
        if timeout is not None:
            late = DeadlineExceededError("Deadline Exceeded")
            self._timer = asyncio.get_running_loop().call_later(timeout, self.end, late)

    def __aiter__(self) -> InprocStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._responses)
        except asyncio.CancelledError:
            self.cancel()  # as grpc.aio does: a call whose reader was cancelled is cancelled
            raise

    def cancel(self) -> None:
        """Ends the call; whoever reads it gets RequestCancelledError."""
        self.end(RequestCancelledError("cancelled by the caller"))

    def end(self, error: Exception | None, *, drop: bool = True) -> None:
        """Ends both sides: the reader gets `error` (at once if `drop`), the servicer is cancelled. First end counts."""
        if self._responses.close(error, drop=drop):
            self._context.finish(cancelled=drop)
            if self._server is not None:
                self._server.closed(self)
            if self._timer is not None:
                self._timer.cancel()
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    async def _serve(self, answers: AsyncIterator[Any]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(answers):  # type: ignore[type-var]
                async for answer in answers:
                    await self._responses.put(answer)
        except asyncio.CancelledError:
            self.end(RequestCancelledError("cancelled"))
            raise
        except Exception as raised:
            # Through the codec, so that a caller sees exactly what it would see over gRPC.
            error = _status.decode(*_status.encode(errors.to_api_error(raised)))
        self.end(error, drop=False)  # answers given before an error are still read, as over gRPC

    async def _write(self, source: AsyncIterator[Any], pipe: _Pipe) -> None:
        try:
            async for request in source:
                await pipe.put(request)
            pipe.close()
        except Exception as error:
            _log.exception("the request stream of a call failed")
            self.end(error)


class InprocContext:
    """What our servicers use of grpc.aio.ServicerContext."""

    def __init__(self, timeout: float | None, metadata: Any) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout
        self._metadata = tuple(metadata or ())
        self._done = False
        self._cancelled = False
        self._callbacks: list[Callable[[InprocContext], None]] = []

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Ends the call with a status."""
        rich = dict(trailing_metadata).get(_status.DETAILS_KEY)
        raise _status.decode(code.name, details, rich)

    def time_remaining(self) -> float | None:
        """Seconds to the deadline; None without one."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller's metadata."""
        return self._metadata

    def cancelled(self) -> bool:
        """Whether the call ended without the servicer's doing."""
        return self._cancelled

    def done(self) -> bool:
        """Whether the call is over."""
        return self._done

    def add_done_callback(self, callback: Callable[[InprocContext], None]) -> None:
        """Calls `callback` when the call is over."""
        self._callbacks.append(callback)

    def peer(self) -> str:
        """Who calls."""
        return "inproc"

    def finish(self, *, cancelled: bool) -> None:
        """Marks the end; for the transport."""
        self._done, self._cancelled = True, cancelled
        for callback in self._callbacks:
            callback(self)


class _Pipe:
    """A bounded queue with an end, read as an async iterator."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue(_BUFFER)
        self._closed = False
        self._dropped = False
        self._error: Exception | None = None

    async def put(self, item: Any) -> None:
        if not self._closed:
            await self._queue.put(item)

    def close(self, error: Exception | None = None, *, drop: bool = False) -> bool:
        """Ends the pipe with `error`, dropping what is unread if told to; False if it had ended before."""
        if self._closed:
            return False
        self._closed, self._error, self._dropped = True, error, drop
        if not self._queue.full():
            self._queue.put_nowait(_END)  # wakes a waiting reader; a full queue has none
        return True

    def __aiter__(self) -> _Pipe:
        return self

    async def __anext__(self) -> Any:
        if not self._dropped and not (self._closed and self._queue.empty()):
            item = await self._queue.get()
            if item is not _END and not self._dropped:
                return item
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration
