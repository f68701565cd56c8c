"""The exception tree as gRPC status details (google.rpc.Status), and back."""

from __future__ import annotations

import contextlib
from typing import TypeVar

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kadence.errors import BY_CODE, APIError, FieldViolation, InternalError, InvalidRequestError, OverloadedError

M = TypeVar("M", bound=Message)

# The trailing-metadata key under which gRPC carries the details.
DETAILS_KEY = "grpc-status-details-bin"

# gRPC drops a status whose metadata exceeds 8 KiB, so everything that comes from a request is cut, in UTF-8 bytes.
_MESSAGE_BYTES = 800
_FIELD_BYTES = 100
_DESCRIPTION_BYTES = 300
_VIOLATIONS = 8


def encode(error: APIError) -> tuple[str, str, bytes]:
    """(status code name, message, serialized google.rpc.Status) of an error; long texts are cut to fit."""
    message = _cut(error.message, _MESSAGE_BYTES)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    if isinstance(error, InvalidRequestError) and error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations[:_VIOLATIONS]:
            field, description = _cut(violation.field, _FIELD_BYTES), _cut(violation.description, _DESCRIPTION_BYTES)
            bad_request.field_violations.add(field=field, description=description)
        status.details.add().Pack(bad_request)
    if isinstance(error, OverloadedError) and error.retry_after > 0:
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromNanoseconds(round(error.retry_after * 1e9))
        status.details.add().Pack(retry_info)
    if error.request_id:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=_cut(error.request_id, _DESCRIPTION_BYTES)))
    return error.code, message, status.SerializeToString()


def decode(code_name: str, message: str, details: bytes | None) -> APIError:
    """The error that a failed call means. Details that are absent or unreadable only make it poorer.

    The instance keeps `code_name` as its `code`. Without the server's advice `OverloadedError.retry_after` is 0.
    """
    violations: tuple[FieldViolation, ...] = ()
    retry_after, request_id = 0.0, ""
    for detail in _parse(details).details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad_request = _unpack(detail, error_details_pb2.BadRequest())
            violations = tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = _unpack(detail, error_details_pb2.RetryInfo()).retry_delay
            retry_after = max(0.0, delay.seconds + delay.nanos / 1e9)
        elif detail.Is(error_details_pb2.RequestInfo.DESCRIPTOR):
            request_id = _unpack(detail, error_details_pb2.RequestInfo()).request_id
    kind = BY_CODE.get(code_name, InternalError)
    error: APIError
    if issubclass(kind, InvalidRequestError):
        error = kind(message, violations=violations, request_id=request_id)
    elif issubclass(kind, OverloadedError):
        error = kind(message, retry_after=retry_after, request_id=request_id)
    else:
        error = kind(message, request_id=request_id)
    error.code = code_name if code_name in BY_CODE else kind.code
    return error


def _parse(details: bytes | None) -> status_pb2.Status:
    status = status_pb2.Status()
    try:
        status.ParseFromString(details or b"")
    except DecodeError:
        return status_pb2.Status()
    return status


def _unpack(detail: Any, into: M) -> M:
    """`into` filled from one detail, or left as it is where the detail is damaged."""
    with contextlib.suppress(DecodeError):
        detail.Unpack(into)
    return into


def _cut(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of UTF-8; what is cut off shows as "..." at the end."""
    raw = text.encode("utf-8", errors="replace")  # a lone surrogate cannot travel
    text = raw.decode("utf-8")
    return text if len(raw) <= limit else raw[: limit - 3].decode("utf-8", errors="ignore") + "..."
