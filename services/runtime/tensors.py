"""Checks of tensors on the wire, before anything touches their bytes."""

from __future__ import annotations

import math

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2

ITEM_BYTES: dict[int, int] = {
    common_pb2.DTYPE_FLOAT32: 4,
    common_pb2.DTYPE_BFLOAT16: 2,
    common_pb2.DTYPE_FLOAT16: 2,
    common_pb2.DTYPE_INT32: 4,
}


def check(tensor: common_pb2.Tensor, field: str, *, rank: int) -> tuple[int, ...]:
    """The tensor's shape, once dtype, rank and byte count are right. Raises InvalidRequestError naming `field`."""
    shape = tuple(tensor.shape)
    if tensor.dtype not in ITEM_BYTES:
        raise InvalidRequestError.of(f"{field}.dtype", f"is {tensor.dtype}; must be one of {sorted(ITEM_BYTES)}")
    if len(shape) != rank or any(size < 0 for size in shape):
        raise InvalidRequestError.of(f"{field}.shape", f"is {list(shape)}; must be {rank} sizes, none negative")
    size = math.prod(shape) * ITEM_BYTES[tensor.dtype]
    if len(tensor.data) != size:
        raise InvalidRequestError.of(f"{field}.data", f"has {len(tensor.data)} bytes; shape and dtype need {size}")
    return shape
