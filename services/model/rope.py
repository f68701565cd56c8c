"""Rotary position embedding in the half-split (NeoX) layout that Hugging Face checkpoints use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from services.kernels import row_passes
from services.model.rope_parameters import Linear, Llama3, RopeParameters, Yarn


class Rope:
    """cos and sin of every position, looked up once per step and shared by all layers (RoFormer, section 3.4)."""

    def __init__(
        self,
        head_dim: int,
        rope: RopeParameters,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Computed on the CPU wherever it is used, so that every device turns by the same numbers."""
        angle = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies(head_dim, rope)
        cos, sin = angle.cos(), angle.sin()
        if isinstance(rope.scaling, Yarn):
            cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
        self._cos = torch.cat([cos, cos], dim=-1).to(device, dtype)  # [positions, head_dim]
        self._sin = sin.to(device, dtype)  # [positions, head_dim / 2]

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [n] -> cos [n, 1, head_dim], sin [n, 1, head_dim / 2]."""
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, head_dim] turned by the rows' angles; a new tensor."""
    half = x.shape[-1] // 2
    if row_passes.offered(x.dtype, x.device, half):
        return row_passes.rotate(x, cos, sin)
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-1)
    out[..., half:].addcmul_(x[..., :half], sin)
    return out


def frequencies(head_dim: int, rope: RopeParameters) -> Tensor:
    """Radians per position, [head_dim / 2] in float32.

    Rounded step by step as transformers rounds: by position 131071 one ulp of the frequency moves a cosine by 0.02.
    """
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / periods
    match rope.scaling:
        case Linear(factor=factor):
            return plain / factor
        case Llama3() as scaling:
            return _llama3(plain, scaling)
        case Yarn() as scaling:
            ramp = _yarn_ramp(head_dim, rope.theta, scaling)  # 1 where frequencies are kept
            return 1.0 / (scaling.factor * periods) * (1 - ramp) + plain * ramp
    return plain


def _llama3(plain: Tensor, s: Llama3) -> Tensor:
    length = 2 * math.pi / plain
    longest, shortest = s.original_positions / s.low_freq_factor, s.original_positions / s.high_freq_factor
    smooth = (s.original_positions / length - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - smooth) * plain / s.factor + smooth * plain
    return torch.where(length > longest, plain / s.factor, torch.where(length < shortest, plain, between))


def _yarn_ramp(head_dim: int, theta: float, s: Yarn) -> Tensor:
    def dimension(rotations: float) -> float:
        """Where a frequency makes so many rotations within the original positions."""
        return head_dim * math.log(s.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
