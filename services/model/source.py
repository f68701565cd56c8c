"""Where a model's tensors come from: a checkpoint's folder, or anything else that can hand them out by name."""

from __future__ import annotations

from typing import Protocol

import torch


class Source(Protocol):
    """Hands out tensors by the names of a Hugging Face checkpoint; their device is where the model will run."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Tensor `name` of `shape` as `dtype`; it becomes the taker's own."""
        ...
