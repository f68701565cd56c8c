"""Row-wise passes between the matrix products of a decoder, in plain torch: the reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 * size], gates first -> [n, size]: gate * sigmoid(gate) * up (SwiGLU, Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
