"""Convolution over the slots of draft blocks: in C for bfloat16 on CPUs with AVX512-BF16, else by the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from services.kernels import native
from services.kernels.local_convolution_ref import local_convolution


class LocalConvolution:
    """The convolution of one geometry, over blocks that lie one after the other in a batch."""

    def __init__(self, dtype: torch.dtype, device: torch.device, taps: int, group: int) -> None:
        self._function: Callable[..., None] | None = None
        if (
            dtype == torch.bfloat16
            and device.type == "cpu"
            and torch.cpu._is_avx512_bf16_supported()
            and group % 16 == 0
        ):
            library = native.load("local_convolution", TAPS=taps, GROUP=group)
            if library is not None:
                self._function = library.local_convolution
                pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
                self._function.argtypes = [*[pointer] * 4, long, pointer, long, long, long, integer]
                self._function.restype = None

    @property
    def native(self) -> bool:
        """Whether it runs in C."""
        return self._function is not None

    def __call__(self, z: Tensor, slots: int, base: Tensor, dynamic: Tensor, residual: Tensor | None = None) -> Tensor:
        """z [n, h], base [t, h], dynamic [n, t, G] (rows may be strided) -> [n, h], `residual` [n, h] added.

        Row r is slot r % slots of its block; rows that fill no block give anything finite.
        """
        if self._function is None:
            return _reference(z, slots, base, dynamic, residual)
        n, hidden = z.shape
        out = torch.empty_like(z)
        self._function(
            z.data_ptr(),
            None if residual is None else residual.data_ptr(),
            base.data_ptr(),
            dynamic.data_ptr(),
            dynamic.stride(0),
            out.data_ptr(),
            n,
            hidden,
            slots,
            torch.get_num_threads(),
        )
        return out


def _reference(z: Tensor, slots: int, base: Tensor, dynamic: Tensor, residual: Tensor | None) -> Tensor:
    n, hidden = z.shape
    whole = n // slots * slots
    blocks = z[:whole].view(-1, slots, hidden)
    out = local_convolution(blocks, base, dynamic[:whole].view(-1, slots, *dynamic.shape[1:])).view(whole, hidden)
    if whole < n:
        out = F.pad(out, (0, 0, 0, n - whole))
    return out if residual is None else out.add_(residual)
