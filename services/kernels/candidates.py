"""The best k ids of each row of logits: in C where this processor has AVX-512, else by the reference in torch.

`candidates_ref` is the definition: values and ids are the same, the log of the mass to float32 rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from services.kernels import candidates_ref, native


def candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `candidates_ref.candidates`."""
    function = _find(logits)
    if function is None:
        return candidates_ref.candidates(logits, k)
    rows, size = logits.shape
    assert 0 < k <= size
    values = torch.empty((rows, k), dtype=torch.float32)
    ids = torch.empty((rows, k), dtype=torch.int64)
    total = torch.empty(rows, dtype=torch.float32)
    function(
        logits.data_ptr(),
        rows,
        logits.stride(0),
        size,
        k,
        values.data_ptr(),
        ids.data_ptr(),
        total.data_ptr(),
        torch.get_num_threads(),
    )
    return values, ids, total


def _find(logits: Tensor) -> Callable[..., None] | None:
    """The compiled kernel for such logits, or None where it cannot run."""
    if logits.device.type != "cpu" or logits.dtype not in (torch.bfloat16, torch.float32) or logits.stride(1) != 1:
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    library = native.load("candidates", BF16=int(logits.dtype == torch.bfloat16))
    if library is None:
        return None
    function = library.candidates
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [pointer, long, long, long, integer, pointer, pointer, pointer, integer]
    function.restype = None
    return function
