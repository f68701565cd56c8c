"""Models of published shapes with random weights: what a step costs depends on shapes, not on what weights say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.drafter.draft_arch import DraftArch
from services.model.arch import Arch
from services.model.rope_parameters import RopeParameters

_SPREAD = 0.02  # of the weights; what transformers starts from
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Shape:
    """A target and its drafter."""

    name: str
    target: Arch
    drafter: DraftArch
    dtype: torch.dtype
    context: int
    """Tokens before the first step."""


class RandomWeights:
    """A source of random tensors on one device; the tables that target and drafter share are made once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: dict[str, Tensor] = {}
        self.bytes = 0
        """Of all tensors made."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Tensor `name`: ones for norms, else normal; never zeros, on which kernels may run faster."""
        if name in self._shared:
            return self._shared[name]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        tensor = tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(std=_SPREAD)
        self.bytes += tensor.numel() * tensor.element_size()
        if name in _SHARED:
            self._shared[name] = tensor
        return tensor


def _target(hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int, **more: int) -> Arch:
    return Arch(
        family="qwen3",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=more.get("kv_heads", 8),
        head_dim=more.get("head_dim", 128),
        vocab_size=vocabulary,
        max_position=40960,
        rope=RopeParameters(1e6),
        rms_norm_eps=1e-6,
        tied_head=False,
        config_dtype="bfloat16",
        qk_norm=True,
    )


def _drafter(target: Arch, layers: int, heads: int, taps: tuple[int, ...], window: int, rank: int = 256) -> DraftArch:
    """A DFlash 2 drafter of the target's width: blocks of 8, convolutions of 2 taps in groups of 16."""
    return DraftArch(
        kind="dflash2",
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        attention_bias=False,
        block_size=8,
        taps=taps,
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        mask_token_id=target.vocab_size - 1,
        windows=(window,) * layers,
        causal=(False,) * layers,
        first_slot=1,
        conv_taps=2,
        conv_group=16,
        selector_rank=rank,
        selector_top_k=16,
    )


def qwen3_8b() -> Shape:
    """Qwen3-8B, and a DFlash 2 drafter with the sizes of its published DFlash drafter."""
    target = _target(4096, 12288, 36, 32, 151936)
    return Shape("qwen3-8b", target, _drafter(target, 5, 32, (1, 9, 17, 25, 33), 0), torch.bfloat16, 1024)


def dense_27b() -> Shape:
    """27B parameters in the widths of Qwen3.8-27B, with its published DFlash 2 drafter.

    That model's layers are not all attention. Here they are, with 80 query heads, which makes the parameters as many.
    """
    target = _target(5120, 17408, 64, 80, 248320)
    return Shape("dense-27b", target, _drafter(target, 5, 32, (5, 19, 33, 47, 61), 2048), torch.bfloat16, 1024)


def tiny() -> Shape:
    """A few thousand parameters, to try the measurement itself."""
    target = _target(64, 96, 4, 4, 640, kv_heads=2, head_dim=16)
    return Shape("tiny", target, _drafter(target, 2, 4, (0, 2), 0, rank=8), torch.float32, 40)


SHAPES = {"qwen3-8b": qwen3_8b, "dense-27b": dense_27b, "tiny": tiny}
