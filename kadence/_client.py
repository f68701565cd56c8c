"""The synchronous client, on grpc."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from kadence import _convert, _core, _security, _state
from kadence._exchange import Exchange
from kadence.errors import APIError, RequestCancelledError
from kadence.types import Chunk, ClusterStatus, GenerateOptions, GenerateResult, ModelInfo, RetryConfig, TLSConfig
from kadence.v1 import inference_pb2, inference_pb2_grpc

T = TypeVar("T")


class Client:
    """A connection to a cluster; threads may share it. Use it as a context manager, or call close().

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
        self._channel = _security.dial(grpc, self.endpoint, _security.credentials(tls), tls)
        self._closed = False
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """The whole answer to a prompt, messages or token ids. Raises an APIError of kadence.errors."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """The answer piece by piece: an iterator over Chunks. Leaving its `with` block early cancels the request."""
        prepared = _core.prepare(self._settings, prompt, options)
        stream = Stream(self._stub().Generate, prepared, self._settings)
        with self._lock:
            self._streams.add(stream)
        return stream

    def models(self, *, timeout: float | None = None) -> tuple[ModelInfo, ...]:
        """The models served. Raises an APIError of kadence.errors."""
        return _convert.models(self._query(self._stub().ListModels, inference_pb2.ListModelsRequest(), timeout))

    def status(self, *, timeout: float | None = None) -> ClusterStatus:
        """A snapshot of the cluster. Raises an APIError of kadence.errors."""
        return _convert.status(self._query(self._stub().GetStatus, inference_pb2.GetStatusRequest(), timeout))

    def close(self) -> None:
        """Cancels what is running and closes the connection. Calls after it raise RuntimeError."""
        with self._lock:
            self._closed = True
            for stream in self._streams:  # one that waits to be resumed has no call that the channel could end
                stream.cancel()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _stub(self) -> Any:
        if self._closed:
            raise RuntimeError("the client is closed")
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    def _query(self, method: Callable[..., T], request: Any, timeout: float | None) -> T:
        seconds = self._settings.call_timeout(timeout, _core.QUERY_TIMEOUT)
        plain = self._settings.call_metadata(None)
        course = _core.Course(seconds, self._settings.retry, time.monotonic())
        while True:
            metadata = self._settings.authorized(plain)
            try:
                return method(request, timeout=course.remaining(time.monotonic()), metadata=metadata)
            except grpc.RpcError as raised:
                error = _error(raised, self._settings)
                delay = course.delay_after(error, _core.verdict(error, False), time.monotonic(), random.random())
                if delay is None:
                    raise error from raised
            time.sleep(delay)


class Stream:
    """An answer, or n of them, arriving. Iterate it; `result` is there after the end. cancel() works from any thread.

    Should the connection or the server break, it goes on by itself where it stood; see RetryConfig.
    """

    def __init__(self, method: Callable[..., Any], prepared: _core.Prepared, settings: _core.Settings) -> None:
        self._method = method
        self._settings = settings
        self._exchange = Exchange(settings, prepared, time.monotonic())
        self._answers = self._exchange.answers
        self._cancelled = threading.Event()
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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while True:
            try:
                chunk = self._exchange.feed(next(self._call))
            except StopIteration:
                self._answers.end()
                raise
            except grpc.RpcError as raised:
                if self._answers.finished:
                    raise StopIteration from None
                self._retry(_error(raised, self._settings, self.request_id), raised)
            else:
                if chunk is not None:
                    return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cancel()

    def _open(self) -> Any:
        opening = self._exchange.open(time.monotonic())
        return self._method(opening.request, timeout=opening.timeout, metadata=opening.metadata)

    def _retry(self, error: APIError, cause: Exception) -> None:
        """Waits and opens the call anew, or raises `error`."""
        delay = self._exchange.delay_after(error, time.monotonic(), random.random())
        if delay is None:
            raise error from cause
        if self._cancelled.wait(delay):
            raise RequestCancelledError("cancelled by the client", request_id=self.request_id) from cause
        self._call = self._open()
        if self._cancelled.is_set():  # cancel() may have met the old call
            self._call.cancel()


def _error(raised: Any, settings: _core.Settings, request_id: str = "") -> APIError:
    trailing = raised.trailing_metadata()
    return _core.error_of(raised.code().name, raised.details(), trailing, request_id, tls=settings.tls)
