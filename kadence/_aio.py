"""The asynchronous client, on grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kadence import _convert, _core, _security, _state
from kadence._exchange import Exchange
from kadence.errors import APIError, RequestCancelledError
from kadence.types import Chunk, ClusterStatus, GenerateOptions, GenerateResult, ModelInfo, RetryConfig, TLSConfig
from kadence.v1 import inference_pb2, inference_pb2_grpc


class AsyncClient:
    """A connection to a cluster, of one event loop. Use it as an async context manager, or await close().

    `endpoint` is "host:port"; left out, $KADENCE_ENDPOINT or the cluster that `kadence up` started. `timeout` is in
    seconds per generation. `tls` encrypts the connection. `token`, or a function that gives one and does not block,
    goes with each call as "authorization: Bearer ..."; left out, it is $KADENCE_TOKEN, "" is none. Without TLS it
    travels only within this machine, unless `allow_insecure_token`. Nothing is dialled before the first call. Raises
    ConfigError if no endpoint is known, a certificate cannot be used, or the token may not travel.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        timeout: float = _core.DEFAULT_TIMEOUT,
        retry: RetryConfig | None = None,
        metadata: Mapping[str, str] | None = None,
        tls: TLSConfig | None = None,
        token: _security.Token | None = None,
        allow_insecure_token: bool = False,
    ) -> None:
        self.endpoint = _state.find_endpoint(endpoint)
        self._settings = _security.settings(self.endpoint, timeout, retry, metadata, tls, token, allow_insecure_token)
        self._credentials = _security.credentials(tls)
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._closed = False
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """The whole answer to a prompt, messages or token ids. Raises an APIError of kadence.errors."""
        async with self.stream(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """The answer piece by piece: an async iterator over Chunks. Leaving its `async with` block early cancels."""
        prepared = _core.prepare(self._settings, prompt, options)
        stream = AsyncStream(self._stub().Generate, prepared, self._settings)
        self._streams.add(stream)
        return stream

    async def models(self, *, timeout: float | None = None) -> tuple[ModelInfo, ...]:  # noqa: ASYNC109 (as in Client)
        """The models served. Raises an APIError of kadence.errors."""
        seconds = self._settings.call_timeout(timeout, _core.QUERY_TIMEOUT)
        return _convert.models(await self._query(self._stub().ListModels, inference_pb2.ListModelsRequest(), seconds))

    async def status(self, *, timeout: float | None = None) -> ClusterStatus:  # noqa: ASYNC109 (as in Client)
        """A snapshot of the cluster. Raises an APIError of kadence.errors."""
        seconds = self._settings.call_timeout(timeout, _core.QUERY_TIMEOUT)
        return _convert.status(await self._query(self._stub().GetStatus, inference_pb2.GetStatusRequest(), seconds))

    async def close(self) -> None:
        """Cancels what is running and closes the connection. Calls after it raise RuntimeError."""
        self._closed = True
        for stream in self._streams:  # one that waits to be resumed has no call that the channel could end
            stream.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def _stub(self) -> Any:
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:  # a channel belongs to the loop that runs when it is made
            self._channel = _security.dial(grpc.aio, self.endpoint, self._credentials, self._tls)
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def _query(self, method: Callable[..., Any], request: Any, seconds: float) -> Any:
        plain = self._settings.call_metadata(None)
        course = _core.Course(seconds, self._settings.retry, time.monotonic())
        while True:
            metadata = self._settings.authorized(plain)
            try:
                return await method(request, timeout=course.remaining(time.monotonic()), metadata=metadata)
            except grpc.aio.AioRpcError as raised:
                error = _error(raised, self._settings)
                delay = course.delay_after(error, _core.verdict(error, False), time.monotonic(), random.random())
                if delay is None:
                    raise error from raised
            await asyncio.sleep(delay)


class AsyncStream:
    """An answer, or n of them, arriving. Iterate it; `result` is there after the end.

    Should the connection or the server break, it goes on by itself where it stood; see RetryConfig.
    """

    def __init__(self, method: Callable[..., Any], prepared: _core.Prepared, settings: _core.Settings) -> None:
        self._method = method
        self._settings = settings
        self._exchange = Exchange(settings, prepared, time.monotonic())
        self._answers = self._exchange.answers
        self._cancelled = asyncio.Event()
        self._call = self._open()

    @property
    def result(self) -> GenerateResult:
        """The finished answer, the others in its `alternatives`. Raises RuntimeError before the iteration's end."""
        return self._answers.result

    @property
    def request_id(self) -> str:
        """The effective request id; empty before the first chunk."""
        return self._answers.request_id

    @property
    def resumes(self) -> int:
        """How often the stream broke and went on."""
        return self._exchange.resumes

    def cancel(self) -> None:
        """Tells the server to stop; further iteration raises RequestCancelledError. Nothing happens after the end."""
        self._cancelled.set()
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            try:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    self._answers.end()
                    raise StopAsyncIteration
                chunk = self._exchange.feed(response)
            except grpc.aio.AioRpcError as raised:
                if self._answers.finished:
                    raise StopAsyncIteration from None
                if _task_is_cancelled():  # grpc.aio swallows a cancellation that meets a failing call
                    raise asyncio.CancelledError from None
                await self._retry(_error(raised, self._settings, self.request_id), raised)
            except asyncio.CancelledError:
                # grpc.aio raises it for a call that cancel() or close() ended as well as for a task that is cancelled.
                self._call.cancel()  # which it forgets to do when the call was only starting
                if not _task_is_cancelled():
                    raise RequestCancelledError("cancelled by the client", request_id=self.request_id) from None
                raise
            else:
                if chunk is not None:
                    return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.cancel()

    def _open(self) -> Any:
        opening = self._exchange.open(time.monotonic())
        return self._method(opening.request, timeout=opening.timeout, metadata=opening.metadata)

    async def _retry(self, error: APIError, cause: Exception) -> None:
        """Waits and opens the call anew, or raises `error`."""
        delay = self._exchange.delay_after(error, time.monotonic(), random.random())
        if delay is None:
            raise error from cause
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), delay)
        if self._cancelled.is_set():
            raise RequestCancelledError("cancelled by the client", request_id=self.request_id) from cause
        self._call = self._open()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error(raised: grpc.aio.AioRpcError, settings: _core.Settings, request_id: str = "") -> APIError:
    trailing = raised.trailing_metadata()
    return _core.error_of(raised.code().name, raised.details(), trailing, request_id, tls=settings.tls)
