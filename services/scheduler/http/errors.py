"""Between the exception tree and OpenAI's error bodies: status, type, param, code, headers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kadence.errors import (
    APIError,
    AuthenticationError,
    ConflictError,
    DeadlineExceededError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from services.scheduler.http import fields

_RETRY_UNAVAILABLE = 1.0
_PATH = re.compile(r"^(?:sampling\.)?([^.\[]+)(.*)$")


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"unknown model {fields.shown(name)}; served: {fields.shown(served)}")


class Answer(NamedTuple):
    """An error as HTTP says it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None


# The first class that fits counts.
_KINDS: tuple[tuple[type[APIError], _Kind], ...] = (
    (InvalidRequestError, _Kind(400, "invalid_request_error", None)),
    (AuthenticationError, _Kind(401, "authentication_error", "invalid_api_key")),
    (PermissionDeniedError, _Kind(403, "permission_error", "permission_denied")),
    (ModelNotFoundError, _Kind(404, "invalid_request_error", "model_not_found")),
    (NotFoundError, _Kind(404, "invalid_request_error", "not_found")),
    (ConflictError, _Kind(409, "conflict_error", "conflict")),
    (OverloadedError, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (RequestCancelledError, _Kind(499, "cancelled_error", "cancelled")),
    (UnsupportedError, _Kind(501, "unsupported_error", "unsupported")),
    (UnavailableError, _Kind(503, "unavailable_error", "unavailable")),
    (DeadlineExceededError, _Kind(504, "timeout_error", "timeout")),
    (InternalError, _Kind(500, "server_error", "internal_error")),
)


def answer(error: APIError) -> Answer:
    """The response that `error` means."""
    kind = next((kind for cls, kind in _KINDS if isinstance(error, cls)), _KINDS[-1][1])
    param = None
    if isinstance(error, InvalidRequestError) and error.violations:
        param = error.violations[0].field
    elif isinstance(error, ModelNotFoundError):
        param = "model"
    return Answer(kind.status, body(error.message, kind.type, param, kind.code), _retry(error))


def body(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error body."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """`error` with the SDK's field paths turned into those of HTTP: sampling.x becomes `names`[x], else x."""
    if not error.violations:
        return error
    violations = tuple(FieldViolation(_field(v.field, names), v.description) for v in error.violations)
    message = error.message
    for before, after in zip(error.violations, violations, strict=True):
        message = message.replace(f"{before.field}: {before.description}", f"{after.field}: {after.description}", 1)
    return InvalidRequestError(message, violations=violations, request_id=error.request_id)


def _field(path: str, names: Mapping[str, str]) -> str:
    match = _PATH.match(path)
    if match is None:
        return path
    return names.get(match[1], match[1]) + match[2]


def _retry(error: APIError) -> dict[str, str]:
    seconds = 0.0
    if isinstance(error, OverloadedError):
        seconds = error.retry_after
    elif isinstance(error, UnavailableError):
        seconds = _RETRY_UNAVAILABLE
    if seconds <= 0:
        return {}
    # The standard header knows whole seconds only; OpenAI's clients prefer the other one.
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
