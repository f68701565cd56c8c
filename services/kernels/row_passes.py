"""Row-wise passes between a decoder's matrix products, in C for bfloat16 on CPUs with AVX512-BF16.

torch runs each of them as two to six passes over memory; these are one, in float32, rounded once. The references are
row_passes_ref, services.model.norm and services.model.rope.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from services.kernels import native
from services.kernels import row_passes_ref as reference


def offered(dtype: torch.dtype, device: torch.device, size: int) -> bool:
    """Whether rows of `size` numbers can take these passes on this machine; compiles them on first use."""
    return dtype == torch.bfloat16 and device.type == "cpu" and size % 16 == 0 and _library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As services.model.norm.RMSNorm, where `offered`; weight float32 [size], or [heads, size] for x [n, heads, size].

    x [n, size] or [n, heads, size]: rows may be strided, heads and numbers lie together.
    """
    library = _library()
    assert library is not None and x.dtype == torch.bfloat16, "not offered"
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]), "heads that do not lie together"
    heads, size = (1, x.shape[1]) if x.dim() == 2 else x.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype)
    threads = torch.get_num_threads()
    library.rms_norm(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.dim() == 1,
        eps,
        out.data_ptr(),
        len(x),
        heads,
        size,
        threads,
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As services.model.rope.rotate, where half a head is `offered`: x [n, heads, size] as in `rms_norm`."""
    library = _library()
    assert library is not None and x.dtype == cos.dtype == torch.bfloat16, "not offered"
    assert x.stride(2) == 1 and x.stride(1) == x.shape[2], "heads that do not lie together"
    assert cos.is_contiguous() and sin.is_contiguous(), "angles that do not lie together"
    out = torch.empty(x.shape, dtype=x.dtype)
    sizes = *x.shape, torch.get_num_threads()
    library.rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *sizes)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As the reference; gate_up [n, 2 * size] is contiguous."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if not offered(gate_up.dtype, gate_up.device, size):
        return reference.silu_mul(gate_up)
    library = _library()
    assert library is not None and gate_up.is_contiguous(), "rows that are not contiguous"
    out = torch.empty((rows, size), dtype=gate_up.dtype)
    library.silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, torch.get_num_threads())
    return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.load("row_passes") if torch.cpu._is_avx512_bf16_supported() else None
    if library is not None:
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        library.rms_norm.argtypes = [
            pointer,
            long,
            pointer,
            integer,
            ctypes.c_float,
            pointer,
            long,
            long,
            long,
            integer,
        ]
        library.silu_mul.argtypes = [pointer, pointer, long, long, integer]
        library.rotate.argtypes = [pointer, long, *[pointer] * 3, long, long, long, integer]
        library.rms_norm.restype = library.silu_mul.restype = library.rotate.restype = None
    return library
