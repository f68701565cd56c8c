"""Wraps every handler of ours: request id for the logs, exceptions into statuses, grpc_server_* metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram

from kadence.errors import APIError
from services.runtime import errors, logs

_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300)


class ServerMetrics:
    """The grpc-ecosystem's server metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_service", "grpc_method", "grpc_type")
        self.started = Counter("grpc_server_started", "Calls started.", labels, registry=registry)
        self.handled = Counter("grpc_server_handled", "Calls ended.", (*labels, "grpc_code"), registry=registry)
        self.seconds = Histogram(
            "grpc_server_handling_seconds", "Duration of calls.", labels, buckets=_BUCKETS, registry=registry
        )


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Applies `_Call` to the methods of kadence.* services; health and reflection look after themselves."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        path = str(handler_call_details.method)
        if handler is None or not path.startswith("/kadence."):
            return handler
        return wrap(handler, path, self._metrics)


def wrap(handler: Any, path: str, metrics: ServerMetrics) -> grpc.RpcMethodHandler:
    """`handler` with everything around it. Servicers are coroutines (unary answer) or async generators (stream)."""
    _, service, method = path.split("/")

    async def unary(request: Any, context: Any) -> Any:
        call = _Call(metrics, (service, method, grpc_type), request, context)
        try:
            response = await behaviour(request, context)
        except BaseException as error:
            await call.failed(error)
            raise
        call.ended("OK")
        return response

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        call = _Call(metrics, (service, method, grpc_type), request, context)
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except BaseException as error:
            await call.failed(error)
            raise
        call.ended("OK")

    around: Any = stream if handler.response_streaming else unary
    if handler.stream_stream:
        grpc_type, behaviour, make = "bidi_stream", handler.stream_stream, grpc.stream_stream_rpc_method_handler
    elif handler.unary_stream:
        grpc_type, behaviour, make = "server_stream", handler.unary_stream, grpc.unary_stream_rpc_method_handler
    else:
        assert handler.unary_unary, f"{path}: no client-streaming method is in the contracts"
        grpc_type, behaviour, make = "unary", handler.unary_unary, grpc.unary_unary_rpc_method_handler
    return make(around, handler.request_deserializer, handler.response_serializer)


class _Call:
    """One call from start to end, counted once."""

    def __init__(self, metrics: ServerMetrics, labels: tuple[str, str, str], request: Any, context: Any) -> None:
        self._metrics = metrics
        self._labels = labels
        self._context = context
        self._began = time.monotonic()
        logs.request_id.set(getattr(request, "request_id", "") or uuid.uuid4().hex[:16])
        metrics.started.labels(*labels).inc()

    def ended(self, code: str) -> None:
        self._metrics.handled.labels(*self._labels, code).inc()
        self._metrics.seconds.labels(*self._labels).observe(time.monotonic() - self._began)

    async def failed(self, error: BaseException) -> None:
        """Counts `error` and, if it is the servicer's, ends the call with its status (which raises)."""
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            left = self._context.time_remaining()
            self.ended("DEADLINE_EXCEEDED" if left is not None and left <= 0 else "CANCELLED")
            return
        if isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):
            self.ended("UNKNOWN")  # ours raise instead of aborting
            return
        shown: APIError = errors.to_api_error(error)
        self.ended(shown.code)
        await errors.to_status(shown, self._context)
