"""The only place that dials: one call shape for both transports, and every failure a kadence.errors.APIError."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc

from kadence.errors import RequestCancelledError
from services.runtime import inproc
from services.runtime.errors import from_rpc_error
from services.runtime.server import MAX_MESSAGE_BYTES

S = TypeVar("S")

_log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),  # peers are reached directly, whatever the environment says
    # A new channel must not inherit the back-off of an old one to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class Peer(Generic[S]):
    """A connection. `stub` methods: `await stub.Unary(request, timeout=)`, and streams that are async iterators
    with `cancel()`: `stub.ServerStream(request, timeout=)`, `stub.Bidi(async_iterator)`. They raise APIError only.
    """

    def __init__(self, stub: S, channel: grpc.aio.Channel | None) -> None:
        self.stub = stub
        self._channel = channel

    async def close(self) -> None:
        """Ends the connection and its calls."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> S:
        return self.stub

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def connect(stub: Callable[[Any], S], address: str) -> Peer[S]:
    """A peer of the generated class `stub` at "host:port" or "inproc://name"; the first call dials."""
    if address.startswith(inproc.SCHEME):
        return Peer(stub(inproc.InprocChannel(address)), None)
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    return Peer(stub(_GrpcChannel(channel)), channel)


class _GrpcChannel:
    """What a generated stub builds its methods on; each method wraps grpc.aio's."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Awaitable[Any]]:
        method = self._channel.unary_unary(*args, **kwargs)

        async def call(request: Any, *, timeout: float | None = None, metadata: Any = None) -> Any:  # noqa: ASYNC109
            try:
                return await method(request, timeout=timeout, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise _failure(error) from error

        return call

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., GrpcStream]:
        method = self._channel.unary_stream(*args, **kwargs)

        def call(request: Any, *, timeout: float | None = None, metadata: Any = None) -> GrpcStream:
            return GrpcStream(method(request, timeout=timeout, metadata=metadata))

        return call

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., GrpcStream]:
        method = self._channel.stream_stream(*args, **kwargs)

        def call(requests: AsyncIterator[Any], *, timeout: float | None = None, metadata: Any = None) -> GrpcStream:
            return GrpcStream(method(timeout=timeout, metadata=metadata), requests)

        return call


def _failure(error: grpc.aio.AioRpcError) -> BaseException:
    """What a caller gets for a failed call. A cancellation that grpc.aio swallowed, because the call failed in the same
    moment, is given back; else whoever cancelled the task and waits for its end would wait for ever.
    """
    task = asyncio.current_task()
    return asyncio.CancelledError() if task is not None and task.cancelling() else from_rpc_error(error)


class GrpcStream:
    """A running call as an async iterator of its responses."""

    def __init__(self, call: Any, requests: AsyncIterator[Any] | None = None) -> None:
        self._call = call
        self._cancelled = False
        self._failure: Exception | None = None
        self._writer: asyncio.Task[None] | None = None
        if requests is not None:
            # Not grpc's own request iterator: that one's task outlives a call which the server ended.
            writer = self._writer = asyncio.create_task(self._write(requests))
            call.add_done_callback(lambda _: writer.cancel())

    def __aiter__(self) -> GrpcStream:
        return self

    async def __anext__(self) -> Any:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        except asyncio.CancelledError:
            self._call.cancel()  # grpc.aio forgets to when the call's start is what was waited for
            if self._failure is not None:
                raise self._failure from None
            task = asyncio.current_task()
            if self._cancelled and not (task and task.cancelling()):
                raise RequestCancelledError("cancelled by the caller") from None
            raise
        if response is grpc.aio.EOF:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Ends the call; whoever reads it gets RequestCancelledError."""
        self._cancelled = True
        self._call.cancel()

    async def _write(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                await self._call.write(request)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the call is over; its reader is told why
        except Exception as error:
            _log.exception("the request stream of a call failed")
            self._failure = error
            self._call.cancel()
