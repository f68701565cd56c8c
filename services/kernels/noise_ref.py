"""Addressable Gumbel noise: a pure function of (seed, position, token id), so that drafter and target see the same.

Counter-based and stateless: 32-bit integer mixing only, which numpy, torch and Triton compute alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

GUMBEL_SPAN = 19.5
"""More than the largest less the smallest noise: -log(-log(u)) for u in [2^-24, 1 - 2^-24] lies in [-2.82, 16.64]."""

DRAFT, ACCEPT, RESIDUAL = 1, 2, 3
"""Streams of rule `ratio`: what draws the draft, what accepts it, what draws where it was refused, all independent."""

_MASK64 = (1 << 64) - 1


def noise_key(seed: int, first: int, *more: int) -> tuple[int, int]:
    """Two signed 32-bit words that address noise: splitmix64 (Steele et al. 2014) chained over the numbers.

    Rule `match` has one noise per (seed, absolute position); rule `ratio` per (seed, attempt, round, slot, stream).
    """
    word = _splitmix64(seed & _MASK64)
    for number in (first, *(more or (0,))):
        word = _splitmix64(word ^ number)
    return _signed(word & 0xFFFFFFFF), _signed(word >> 32)


def uniform(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys int32 [n, 2], tokens int32 [n or 1, m] -> float32 [n, m], odd multiples of 2^-24: never 0, never 1."""
    bits = _mix(_mix(tokens ^ keys[:, :1]).add_(keys[:, 1:]))
    # 23 bits and a half, exact in float32.
    return bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys int32 [n, 2], tokens int32 [n or 1, m] -> float32 [n, m], standard Gumbel, finite (at most 16.7)."""
    return uniform(keys, tokens).log_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """lowbias32 (Wellons 2018): a bijection of 32-bit words; overwrites x. Right shifts are made logical by masks."""
    x.bitwise_xor_((x >> 16) & 0xFFFF)
    x.mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15) & 0x1FFFF)
    x.mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def key_tensor(keys: list[tuple[int, int]], device: torch.device | None = None) -> Tensor:
    """Keys as the int32 [n, 2] tensor that `gumbel` takes, where the noise is wanted."""
    return torch.tensor(keys, dtype=torch.int32, device=device).view(-1, 2)
