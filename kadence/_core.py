"""What both clients share, without I/O: channel options, a call's time and retries, errors."""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kadence import _convert, _status, _wire
from kadence.errors import APIError, InvalidRequestError, OverloadedError, UnavailableError
from kadence.types import RetryConfig
from kadence.v1 import inference_pb2

DEFAULT_TIMEOUT = 300.0
"""Seconds for a generation, unless the client or the call says otherwise."""
QUERY_TIMEOUT = 10.0
"""Seconds for models() and status(), unless the call says otherwise."""
MAX_TIMEOUT = 30 * 86_400.0
"""Longest time for a call, seconds; gRPC takes one beyond some 290 years as already over."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Retries are ours: gRPC's own would not respect "nothing before the first message" and would multiply.
    ("grpc.enable_retries", 0),
    # gRPC waits a second before it dials again; within that time a retry fails without having tried.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_METADATA_KEY = re.compile(r"[0-9a-z_.-]+\Z")
_METADATA_VALUE = re.compile(r"[\x20-\x7e]*\Z")
_MAX_EXPONENT = 64
"""Beyond it a back-off has reached its limit, and the power might not fit a float."""
Pairs = tuple[tuple[str, str], ...]


def is_local(endpoint: str) -> bool:
    """Whether `endpoint` ("host:port") is this very machine's loopback."""
    host = endpoint.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def channel_options(endpoint: str) -> tuple[tuple[str, Any], ...]:
    """The options for a channel to `endpoint`; a proxy from the environment is no way to this very machine."""
    return (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_local(endpoint) else CHANNEL_OPTIONS


@dataclass(frozen=True)
class Settings:
    """What a client applies to each of its calls."""

    timeout: float = DEFAULT_TIMEOUT
    retry: RetryConfig = field(default_factory=RetryConfig)
    metadata: Mapping[str, str] = field(default_factory=dict)
    authorization: Callable[[], Pairs] = field(default=tuple, repr=False)
    """Metadata that carries the token; asked for each call."""
    tls: bool = False
    """Whether the connection is encrypted."""

    def call_timeout(self, timeout: float | None, default: float | None = None) -> float:
        """Seconds for one call. Raises InvalidRequestError unless it is above 0 and at most MAX_TIMEOUT."""
        chosen = timeout if timeout is not None else default if default is not None else self.timeout
        if isinstance(chosen, bool) or not isinstance(chosen, int | float) or not 0 < chosen <= MAX_TIMEOUT:
            limit = f"a number of seconds above 0 and at most {MAX_TIMEOUT:.0f} (30 days)"
            raise InvalidRequestError.of("timeout", f"{_wire.short(chosen)}; {limit}")
        return float(chosen)

    def call_metadata(self, metadata: Mapping[str, str] | None) -> Pairs:
        """The client's metadata under the call's. Raises InvalidRequestError for what gRPC cannot carry."""
        pairs = {**self.metadata, **(metadata or {})}
        for key, value in pairs.items():
            if not (isinstance(key, str) and _METADATA_KEY.match(key)) or key.endswith("-bin"):
                raise InvalidRequestError.of(
                    "metadata", f"key {key!r} is not of lower-case letters, digits, '_', '-', '.'"
                )
            if not (isinstance(value, str) and _METADATA_VALUE.match(value)):
                raise InvalidRequestError.of("metadata", f"the value of {key} is not printable ASCII text")
        return tuple(pairs.items())

    def authorized(self, pairs: Pairs) -> Pairs:
        """`pairs` with the token, unless they bring their own. Raises ConfigError for a token that cannot travel."""
        return pairs if any(key == "authorization" for key, _ in pairs) else (*pairs, *self.authorization())


class Verdict(enum.Enum):
    """What follows a failed try."""

    FINAL = "the caller gets the error"
    RETRY = "the request is sent anew"
    RESUME = "the request is sent with the tokens held"


def verdict(error: APIError, begun: bool, reopening: bool = False) -> Verdict:
    """What may follow `error`. `begun` tells whether the answer had begun, `reopening` whether the try that failed was
    to resume it and brought no message.
    """
    may_pass = isinstance(error, UnavailableError) or (isinstance(error, OverloadedError) and error.retry_after > 0)
    # The server has not noticed yet that the stream before broke; the same id of a first try is another request's.
    may_pass |= reopening and error.code == "ALREADY_EXISTS"
    if not may_pass:
        return Verdict.FINAL
    return Verdict.RESUME if begun else Verdict.RETRY


class Course:
    """How one call stands: the time it has left, and whether a failed try is followed by another."""

    def __init__(self, timeout: float, retry: RetryConfig, now: float) -> None:
        self._deadline = now + timeout
        self._retry = retry
        self._failures = 0
        self._broken_at: float | None = None

    def remaining(self, now: float) -> float:
        """Seconds left; gRPC takes 0 as already over."""
        return max(0.0, self._deadline - now)

    def progress(self) -> None:
        """The answer has grown; a stream that breaks from now on is resumed as if it were the first time."""
        self._failures, self._broken_at = 0, None

    def delay_after(self, error: APIError, after: Verdict, now: float, chance: float) -> float | None:
        """Seconds to wait before the next try, or None if `error` is final.

        `after` is the verdict on it; `chance` is a random number in [0, 1).
        """
        advice = error.retry_after if isinstance(error, OverloadedError) else 0.0
        self._failures += 1
        if after is Verdict.FINAL:
            return None
        if after is Verdict.RETRY and (self._failures >= self._retry.attempts or advice > self._retry.max_delay):
            return None
        backoff = self._retry.initial_delay * self._retry.multiplier ** min(self._failures - 1, _MAX_EXPONENT)
        delay = min(backoff, self._retry.max_delay) * (1 + self._retry.jitter * (2 * chance - 1))
        delay = max(delay, advice)
        limit = self.remaining(now)
        if after is Verdict.RESUME:
            self._broken_at = now if self._broken_at is None else self._broken_at
            limit = min(limit, self._broken_at + self._retry.resume_seconds - now)
        return delay if delay < limit else None


@dataclass(frozen=True)
class Prepared:
    """A generation, ready to be sent."""

    request: inference_pb2.GenerateRequest
    timeout: float
    metadata: Pairs


def prepare(settings: Settings, prompt: str | None, options: Mapping[str, Any]) -> Prepared:
    """The message, time and metadata of a generation; `options` has keys of GenerateOptions.

    Raises TypeError for an unknown option, InvalidRequestError for a value that does not fit its field and for a
    request that is too large to send.
    """
    request = _convert.request(prompt, options)
    _check_size(request)
    return Prepared(
        request=request,
        timeout=settings.call_timeout(options.get("timeout")),
        metadata=settings.call_metadata(options.get("metadata")),
    )


def _check_size(request: inference_pb2.GenerateRequest) -> None:
    """Raises InvalidRequestError naming the largest field of a message that gRPC would not send."""
    total = request.ByteSize()
    if total <= MAX_MESSAGE_BYTES:
        return
    sizes = {}
    for descriptor, _ in request.ListFields():
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(request)
        rest.ClearField(descriptor.name)  # type: ignore[arg-type]
        sizes[descriptor.name] = total - rest.ByteSize()
    largest = max(sizes, key=lambda name: sizes[name])
    raise InvalidRequestError.of(
        largest, f"{sizes[largest]} bytes make a request of {total} bytes; at most {MAX_MESSAGE_BYTES}"
    )


# How gRPC words a connection that broke under a call, where its status is not UNAVAILABLE.
_BROKEN = ("RST_STREAM", "Stream removed")
# What gRPC says of a connection that could not be made, and what it means with TLS.
_TLS_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is from no authority in root_certificates",
    "Hostname Verification Check failed": "its certificate is for another name; see server_name",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "Socket closed": "it closed the connection, perhaps for want of a client certificate that it trusts",
}


def error_of(
    code_name: str,
    message: str | None,
    trailing: Iterable[tuple[str, str | bytes]] | None,
    request_id: str = "",
    *,
    tls: bool = False,
) -> APIError:
    """The exception for a failed call; `request_id` is used where the server names none."""
    details = next((value for key, value in trailing or () if key == _status.DETAILS_KEY), None)
    message = message or code_name
    if details is None and code_name in ("INTERNAL", "UNKNOWN") and any(mark in message for mark in _BROKEN):
        code_name = "UNAVAILABLE"
    if details is None and code_name == "UNAVAILABLE":
        message = _unreachable(message, tls)
    if details is None and code_name == "DEADLINE_EXCEEDED":  # our own clock's; gRPC may call it "Stream removed"
        message = "the request's time was up"
    error = _status.decode(code_name, message, details if isinstance(details, bytes) else None)
    error.request_id = error.request_id or request_id
    if isinstance(error, UnavailableError):
        error.answered = details is not None or bool(error.request_id)
    return error


def _unreachable(message: str, tls: bool) -> str:
    """gRPC's message with what it means in front, if it is about TLS."""
    if "failed to connect" not in message:
        return message
    if tls:
        hint = next((hint for mark, hint in _TLS_HINTS.items() if mark in message), "")
        return f"TLS with the server failed: {hint} ({message})" if hint else message
    return f"the server may ask for TLS ({message})" if "Socket closed" in message else message
