"""The one exception tree of Kadence, shared by the services that raise it and the SDK that re-raises it.

KadenceError
├── ConfigError               a file or option is wrong; the process does not start
├── CheckpointError           a model folder is missing, damaged or of another shape
├── ExtraMissingError         an optional dependency is not installed
└── APIError                  one gRPC status each
    ├── InvalidRequestError   INVALID_ARGUMENT, OUT_OF_RANGE, FAILED_PRECONDITION; has field violations
    ├── AuthenticationError   UNAUTHENTICATED
    ├── PermissionDeniedError PERMISSION_DENIED
    ├── NotFoundError         NOT_FOUND
    ├── ConflictError         ALREADY_EXISTS, ABORTED
    ├── OverloadedError       RESOURCE_EXHAUSTED; has retry_after seconds
    ├── DeadlineExceededError DEADLINE_EXCEEDED
    ├── RequestCancelledError CANCELLED
    ├── UnavailableError      UNAVAILABLE
    ├── UnsupportedError      UNIMPLEMENTED
    └── InternalError         INTERNAL, UNKNOWN, DATA_LOSS
"""

from __future__ import annotations

from dataclasses import dataclass


class KadenceError(Exception):
    """Base of everything Kadence raises on purpose."""


class ConfigError(KadenceError):
    """A configuration file or option is wrong; the message is one line naming key, value and limit."""


class CheckpointError(KadenceError):
    """A model folder cannot be used; the message is one line naming file and tensor or key."""


class ExtraMissingError(KadenceError):
    """An optional dependency is not installed; the message names the install line."""


@dataclass(frozen=True)
class FieldViolation:
    """One wrong field of a request: its path, and what is wrong with which value against which limit."""

    field: str
    description: str


class APIError(KadenceError):
    """A request that did not succeed. `code` is the name of its gRPC status."""

    code = "UNKNOWN"

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class InvalidRequestError(APIError):
    """The request itself is wrong; trying it again cannot help."""

    code = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, violations: tuple[FieldViolation, ...] = (), request_id: str = "") -> None:
        super().__init__(message, request_id=request_id)
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequestError:
        """The error for one wrong field; its message is "field: description"."""
        return cls(f"{field}: {description}", violations=(FieldViolation(field, description),))


class AuthenticationError(APIError):
    """No, or a wrong, credential."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(APIError):
    """The credential does not allow this."""

    code = "PERMISSION_DENIED"


class NotFoundError(APIError):
    """What the request names does not exist."""

    code = "NOT_FOUND"


class ConflictError(APIError):
    """The request collides with another, such as a request id in use."""

    code = "ALREADY_EXISTS"


class OverloadedError(APIError):
    """No room now; `retry_after` is the server's advice in seconds."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, retry_after: float = 1.0, request_id: str = "") -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after = retry_after


class DeadlineExceededError(APIError):
    """The request's time was up."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(APIError):
    """The request was cancelled."""

    code = "CANCELLED"


class UnavailableError(APIError):
    """The server cannot be reached, or is shutting down; `answered` tells whether it has said so itself."""

    code = "UNAVAILABLE"
    answered = True


class UnsupportedError(APIError):
    """The server does not offer this."""

    code = "UNIMPLEMENTED"


class InternalError(APIError):
    """A fault of the server; details are in its log under the request id."""

    code = "INTERNAL"


# Every gRPC status but OK, by name; a test checks that none is missing.
BY_CODE: dict[str, type[APIError]] = {
    "CANCELLED": RequestCancelledError,
    "UNKNOWN": InternalError,
    "INVALID_ARGUMENT": InvalidRequestError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": ConflictError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "FAILED_PRECONDITION": InvalidRequestError,
    "ABORTED": ConflictError,
    "OUT_OF_RANGE": InvalidRequestError,
    "UNIMPLEMENTED": UnsupportedError,
    "INTERNAL": InternalError,
    "UNAVAILABLE": UnavailableError,
    "DATA_LOSS": InternalError,
    "UNAUTHENTICATED": AuthenticationError,
}
