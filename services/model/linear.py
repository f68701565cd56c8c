"""A linear layer whose weight is laid out once for the device it runs on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN makes a kernel for each number of rows it meets, and keeps it (1 ms and 3 MiB for the layers of the default
# model, 9 ms for its head). So rows are padded to few sizes: each up to 8, then steps of a quarter octave.
_SMALL = 8
_STEPS = 4

# Rows for which oneDNN chooses the blocked weight layout; measured flat between 16 and 128 rows.
_ROWS_HINT = 64


def padded(rows: int) -> int:
    """The next number of rows, from `rows` on, that packed layers are run with."""
    if rows <= _SMALL:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _STEPS)
    return -(-rows // step) * step


def _packs_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """y = x W^T + b, optionally added to a residual.

    On a CPU in bfloat16 the weight is kept in oneDNN's blocked layout: a plain `F.linear` re-orders it on every call,
    which costs as much as the product itself for decode shapes. oneDNN packs it only for CPUs with AVX512BW.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight [out, in], bias [out]."""
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _packs_bfloat16()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [n, out] + x [n, in] W^T + b -> [n, out]."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return residual + F.linear(x, self.weight, self.bias)
