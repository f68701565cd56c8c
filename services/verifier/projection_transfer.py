"""Fetches what makes a drafter's feature rows, piece by piece, and checks it against its fingerprint."""

from __future__ import annotations

import asyncio
import math

import torch

from kadence.errors import ConfigError
from kadence.internal import common_pb2, drafter_pb2, drafter_pb2_grpc
from services.model.projection import ProjectionWeights
from services.runtime.tensors import ITEM_BYTES
from services.runtime.threads import in_passing

_SECONDS = 60.0
_DTYPES = {
    common_pb2.DTYPE_FLOAT32: torch.float32,
    common_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    common_pb2.DTYPE_FLOAT16: torch.float16,
}


async def fetch(
    stub: drafter_pb2_grpc.DrafterServiceStub, drafter: common_pb2.Description, hidden_size: int
) -> ProjectionWeights:
    """The projection of a drafter for a target of that hidden size.

    Raises ConfigError naming both values where it is not what the drafter describes, APIError if the call fails.
    """
    width = drafter.feature_width
    parts = {
        "fc.weight": _Part("fc.weight", (width, len(drafter.taps) * hidden_size)),
        "hidden_norm.weight": _Part("hidden_norm.weight", (width,)),
    }
    async for piece in stub.FetchProjection(drafter_pb2.FetchProjectionRequest(), timeout=_SECONDS):
        if piece.name not in parts:
            raise ConfigError(f"the drafter's projection has a tensor {piece.name}; expected {' and '.join(parts)}")
        parts[piece.name].add(piece)
    weights = ProjectionWeights(
        taps=tuple(drafter.taps),
        fc=parts["fc.weight"].tensor(),
        norm=parts["hidden_norm.weight"].tensor(),
        eps=drafter.feature_norm_eps,
    )
    fingerprint = await asyncio.to_thread(in_passing, lambda: weights.fingerprint)
    if fingerprint != drafter.feature_fingerprint:
        raise ConfigError(
            f"the drafter's projection has fingerprint {fingerprint}, it describes {drafter.feature_fingerprint}"
        )
    return weights


class _Part:
    """A tensor in the making; what does not belong to it is refused before it is kept."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name = name
        self._shape = shape
        self._dtype = common_pb2.DTYPE_UNSPECIFIED
        self._data = bytearray()

    def add(self, piece: drafter_pb2.FetchProjectionResponse) -> None:
        """The next piece. Raises ConfigError."""
        self._dtype = self._dtype or piece.dtype
        if tuple(piece.shape) != self._shape:
            raise ConfigError(f"the drafter's {self._name} has shape {list(piece.shape)}, expected {list(self._shape)}")
        if piece.dtype not in _DTYPES or piece.dtype != self._dtype:
            raise ConfigError(f"the drafter's {self._name} has dtype {piece.dtype}, expected one of {sorted(_DTYPES)}")
        if piece.offset != len(self._data) or piece.offset + len(piece.data) > self._size:
            raise ConfigError(f"the drafter's {self._name} has a piece at {piece.offset}, expected {len(self._data)}")
        self._data += piece.data

    def tensor(self) -> torch.Tensor:
        """The whole. Raises ConfigError if there is less."""
        if not self._data or len(self._data) != self._size:
            raise ConfigError(f"the drafter's {self._name} has {len(self._data)} bytes, expected {self._size}")
        return torch.frombuffer(self._data, dtype=_DTYPES[self._dtype]).view(self._shape)

    @property
    def _size(self) -> int:
        return math.prod(self._shape) * ITEM_BYTES.get(self._dtype, 0)
