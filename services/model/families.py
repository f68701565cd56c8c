"""The families of decoders that can be run, and how each differs from Llama (as transformers defines them)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    qkv_bias: bool = False
    """Query, key and value projections always have a bias."""
    attention_bias: bool = False
    """The config's `attention_bias` gives all four projections one."""
    mlp_bias: bool = False
    """The config's `mlp_bias` is read."""
    qk_norm: bool = False
    num_kv_heads: int | None = None
    """Of a config without `num_key_value_heads`; None: as many as query heads."""
    head_dim: int | None = None
    """Of a config without `head_dim`; None: hidden size over heads."""


FAMILIES = {
    "llama": Family(attention_bias=True, mlp_bias=True),
    "qwen2": Family(qkv_bias=True, num_kv_heads=32),
    "qwen3": Family(attention_bias=True, qk_norm=True, num_kv_heads=32, head_dim=128),
}
