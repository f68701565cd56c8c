"""Rotary position embedding in the half-split (NeoX) layout that Hugging Face checkpoints use."""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """cos and sin of every position, looked up once per step and shared by all layers (RoFormer, section 3.4)."""

    def __init__(self, head_dim: int, theta: float, max_position: int, dtype: torch.dtype) -> None:
        half = head_dim // 2
        # Rounds as transformers does: by position 131071 one ulp of the frequency moves a cosine by up to 0.02.
        frequency = 1.0 / theta ** (torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(max_position, dtype=torch.float32)[:, None] * frequency
        self._cos = torch.cat([angle.cos(), angle.cos()], dim=-1).to(dtype)  # [positions, head_dim]
        self._sin = angle.sin().to(dtype)  # [positions, head_dim / 2]

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> cos [n, 1, head_dim], sin [n, 1, head_dim / 2]."""
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, head_dim] turned by the rows' angles; a new tensor."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out
