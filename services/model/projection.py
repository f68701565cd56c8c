"""What turns a target's tapped hidden states into a drafter's feature rows; shared by the drafter and the verifier."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from services.model.linear import Linear, padded
from services.model.norm import RMSNorm


@dataclass(frozen=True, eq=False)
class ProjectionWeights:
    """A drafter's `fc` and `hidden_norm` as its checkpoint stores them, for M taps of a target of width h_target."""

    taps: tuple[int, ...]
    """Layers of the target whose outputs are read, from 0 (draft-model contracts, section 3.1)."""
    fc: Tensor
    """[h, M * h_target]"""
    norm: Tensor
    """[h]"""
    eps: float

    @property
    def fingerprint(self) -> str:
        """Equal for equal rows: 32 hex digits over taps, eps, dtypes, shapes and every byte."""
        digest = hashlib.sha256(f"{list(self.taps)}{self.eps!r}".encode())
        for tensor in (self.fc, self.norm):
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:32]


class Projection:
    """hidden_norm(fc(taps side by side)): one feature row per token (draft-model contracts, section 3.2)."""

    def __init__(self, weights: ProjectionWeights, dtype: torch.dtype) -> None:
        self.taps = weights.taps
        self.width = weights.fc.shape[0]
        self._fc = Linear(weights.fc.to(dtype))
        self._norm = RMSNorm(weights.norm.to(dtype), weights.eps)

    def __call__(self, taps: list[Tensor]) -> Tensor:
        """Hidden states [n, h_target] of each tap, in the order of `taps`, in the projection's dtype -> [n, h]."""
        n = taps[0].shape[0]
        features = torch.cat(taps, dim=-1)
        if self._fc.packed:
            features = torch.nn.functional.pad(features, (0, 0, 0, padded(n) - n))
        return self._norm(self._fc(features))[:n]
