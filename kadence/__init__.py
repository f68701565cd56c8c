"""Kadence: speculative decoding as a cluster. This package is its client SDK; see `Client` and `AsyncClient`."""

import os

# gRPC's C core writes lines of its own to stderr whenever a peer goes away; read once, when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from kadence._aio import AsyncClient, AsyncStream
from kadence._client import Client, Stream
from kadence.errors import (
    APIError,
    AuthenticationError,
    CheckpointError,
    ConfigError,
    ConflictError,
    DeadlineExceededError,
    ExtraMissingError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    KadenceError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from kadence.types import (
    Chunk,
    ClusterStatus,
    FinishReason,
    GenerateOptions,
    GenerateResult,
    Message,
    ModelInfo,
    ReplicaStatus,
    RetryConfig,
    Rule,
    SamplingOptions,
    Stats,
    TLSConfig,
    TokenLogprobs,
)

__all__ = [
    "APIError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "CheckpointError",
    "Chunk",
    "Client",
    "ClusterStatus",
    "ConfigError",
    "ConflictError",
    "DeadlineExceededError",
    "ExtraMissingError",
    "FieldViolation",
    "FinishReason",
    "GenerateOptions",
    "GenerateResult",
    "InternalError",
    "InvalidRequestError",
    "KadenceError",
    "Message",
    "ModelInfo",
    "NotFoundError",
    "OverloadedError",
    "PermissionDeniedError",
    "ReplicaStatus",
    "RequestCancelledError",
    "RetryConfig",
    "Rule",
    "SamplingOptions",
    "Stats",
    "Stream",
    "TLSConfig",
    "TokenLogprobs",
    "UnavailableError",
    "UnsupportedError",
]
