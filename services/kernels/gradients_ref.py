"""Passes of a drafter's training in plain torch, which differentiates them: the reference of `gradients`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, size], weight float32 [size] -> [n, size]: over the root of the mean square, computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2 * size], gates first -> [n, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, d] turned by its rows' angles: cos [n, d], both halves the same, sin [n, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    c, s = cos[:, None, : sin.shape[1]], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def convolve(z: Tensor, base: Tensor, dynamic: Tensor, slots: int) -> Tensor:
    """z [n, h], base [t, h], dynamic [n, t, G] -> [n, h]: see local_convolution_ref; n is a multiple of `slots`."""
    taps, (_, hidden), groups = len(base), z.shape, dynamic.shape[-1]
    shape = (-1, slots, groups, hidden // groups)
    base, dynamic = base.view(taps, groups, -1), dynamic.reshape(-1, slots, taps, groups)[..., None]
    blocks = z.view(-1, slots, hidden)
    out = (base[0] + dynamic[:, :, 0]) * blocks.view(shape)
    for tap in range(1, taps):
        earlier = F.pad(blocks, (0, 0, tap, 0))[:, :slots].reshape(shape)
        out = out + (base[tap] + dynamic[:, :, tap]) * earlier
    return out.view(z.shape)


def block_softmax(far: Tensor, near: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of scores over both: far [B, heads, N * m, T], of which a row sees the first, near [B, heads, N * m, m].

    seen int64 [B, N]: how many far keys the m rows of each block see.
    """
    m, t = near.shape[-1], far.shape[-1]
    hidden = torch.arange(t, device=far.device) >= seen.repeat_interleave(m, dim=1)[:, None, :, None]
    p = torch.softmax(torch.cat([far.masked_fill(hidden, -torch.inf), near], dim=-1), dim=-1)
    return p[..., :t], p[..., t:]


def cross_entropy_slope(logits: Tensor, total: Tensor, ids: Tensor, mass: Tensor) -> Tensor:
    """Of -sum(mass * log softmax(logits)[ids]) by the logits [n, v], which it may overwrite.

    total float32 [n]: log of the row's mass. ids int64 [n, t], mass float32 [n, t].
    """
    slope = (logits.float() - total[:, None]).exp_().mul_(mass.sum(-1, keepdim=True))
    return slope.scatter_add_(1, ids, -mass).to(logits.dtype)
