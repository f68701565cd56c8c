"""Number formats of weights, by the names that configurations use."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_dtype(name: str, device: torch.device | None = None) -> torch.dtype:
    """`auto` is bfloat16 on GPUs, and where the CPU multiplies it natively (measured 2x faster than float32; 8x slower
    where it does not); else float32.
    """
    if name == "auto":
        if device is not None and device.type != "cpu":
            return torch.bfloat16
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if native else torch.float32
    return DTYPES[name]
