"""Rotary embedding equals that of transformers, for every scaling, at every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from services.model.rope import Rope, frequencies, rotate
from services.model.rope_parameters import RopeParameters, read_rope

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "far": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e5, "factor": 3},
    "llama 3.1": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3},
    "llama 3.2": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3, "factor": 32.0},
    "yarn": _YARN,
    "yarn with whole theta": {**_YARN, "rope_theta": 1000000, "factor": 4},
    "yarn with its attention": {**_YARN, "attention_factor": 1.25},
    "yarn with scales": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.2, "factor": 40.0},
    "yarn with one scale": {**_YARN, "mscale": 0.707},
    "yarn with another ramp": {**_YARN, "beta_fast": 48.5, "beta_slow": 2},
    "yarn not truncated": {**_YARN, "truncate": False},
    "yarn that shrinks": {**_YARN, "factor": 0.5},
    "yarn with a short ramp": {**_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn of few positions": {**_YARN, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("head_dim", [16, 96, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rope_is_that_of_transformers(variant: str, head_dim: int) -> None:
    """To the last bit of the frequency, one of which moves a cosine by 0.02 far out."""
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters=dict(VARIANTS[variant]),
    )
    theirs = LlamaRotaryEmbedding(config)
    rope = read_rope({"rope_parameters": VARIANTS[variant], "max_position_embeddings": 131072}, Path("config.json"))
    assert torch.equal(frequencies(head_dim, rope), theirs.inv_freq)
    positions = torch.tensor([0, 1, 2, 100, 4095, 8191, 40000, 131071])
    x = torch.randn(len(positions), 3, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    got = rotate(x, *Rope(head_dim, rope, 131072, torch.float32).rows(positions))
    torch.testing.assert_close(got, wanted[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


def test_older_files_mean_the_same() -> None:
    """`rope_scaling` and `rope_theta` of transformers 4, read by both."""
    scaling = {key: value for key, value in _YARN.items() if key not in ("rope_theta", "rope_type")}
    older = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **scaling}, "max_position_embeddings": 32768}
    assert read_rope(older, Path("config.json")) == read_rope({"rope_parameters": _YARN}, Path("config.json"))
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=2, **older))
    ours = read_rope(older, Path("config.json"))
    assert torch.equal(frequencies(128, ours), theirs.inv_freq)


def test_rotate_leaves_its_input_alone() -> None:
    x = torch.ones(2, 1, 8)
    rotate(x, *Rope(8, RopeParameters(1e4), 10, torch.float32).rows(torch.tensor([3, 4])))
    assert torch.equal(x, torch.ones(2, 1, 8))
