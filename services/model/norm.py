"""Root-mean-square normalisation with few passes; torch's own is decomposed into slow pieces on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from services.kernels import row_passes


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32 (Zhang & Sennrich 2019)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight [size], or [heads, size] for heads that are normalised each on its own."""
        self._weight, self._eps = weight, eps
        size = weight.shape[-1]
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size): one fused norm and one small operation.
        self._scaled = weight.float() * size**0.5
        self._floor = torch.tensor((size * eps) ** 0.5, device=weight.device)
        self._wide = weight.float().contiguous()
        self._native = row_passes.offered(weight.dtype, weight.device, size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        if x.device.type != "cpu":
            shape, weight = self._weight.shape[-1:], self._weight
            if weight.dim() == 1:
                return F.rms_norm(x, shape, weight, self._eps)
            return F.rms_norm(x, shape, None, self._eps) * weight
        if self._native:
            return row_passes.rms_norm(x, self._wide, self._eps)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        out = wide.div(torch.hypot(length, self._floor)).mul_(self._scaled)
        return out.to(x.dtype)
