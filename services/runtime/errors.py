"""Between exceptions and gRPC statuses, on the serving and on the calling side."""

from __future__ import annotations

import logging
import uuid
from typing import Any, NoReturn

import grpc

from kadence import _status
from kadence.errors import APIError, InternalError
from services.runtime import logs

_log = logging.getLogger(__name__)


def to_api_error(exc: Exception) -> APIError:
    """What the caller may see of `exc`: an APIError as it is, anything else only by request id; the rest is logged."""
    if isinstance(exc, APIError):
        return exc
    request_id = logs.request_id.get() or uuid.uuid4().hex[:16]
    _log.error("internal error (request id %s)", request_id, exc_info=exc)
    return InternalError(f"internal error (request id {request_id})", request_id=request_id)


async def to_status(exc: Exception, context: Any) -> NoReturn:
    """Ends the call of `context` with the status and rich details of `exc`; never returns."""
    code, message, details = _status.encode(to_api_error(exc))
    await context.abort(grpc.StatusCode[code], message, trailing_metadata=((_status.DETAILS_KEY, details),))
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> APIError:
    """The exception a caller catches, rebuilt from a failed call."""
    details = None
    for key, value in error.trailing_metadata() or ():
        if key == _status.DETAILS_KEY:
            details = bytes(value)
    return _status.decode(error.code().name, error.details() or error.code().name, details)
