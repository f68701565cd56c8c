"""Tiny random drafters in the published format (draft-model contracts, sections 1 and 2), for TinyLlama of 4 layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support import tiny_model

TARGET_LAYERS = 4
"""TinyLlama(folder, num_hidden_layers=TARGET_LAYERS) is a target for these drafters."""
MASK = tiny_model.VOCAB_SIZE - 1

SIZES: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "vocab_size": tiny_model.VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "num_target_layers": TARGET_LAYERS,
    "layer_types": ["full_attention", "full_attention"],
    "dtype": "float32",
    "dflash_config": {"block_size": 8, "target_layer_ids": [0, 2], "mask_token_id": MASK},
}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 16}


def write_drafter(
    folder: Path,
    kind: str = "dflash2",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """Writes a "dflash2" or "dflash" checkpoint; `config` overrides keys of SIZES, those of dflash_config included.

    `layer_types` may be one string for all layers. `tensors` are added to the file, or replace its own. Weights are
    wide: drafts vary, and depend on their context, anchor and predecessors. Returns `folder`.
    """
    sizes = config_of(kind, **config)
    weights = random_tensors(sizes, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file({name: t.to(dtype) for name, t in {**weights, **(tensors or {})}.items()}, folder / "model.safetensors")
    return folder


def config_of(kind: str = "dflash2", **config: Any) -> dict[str, Any]:
    """The config.json that `write_drafter` writes."""
    nested = {**SIZES["dflash_config"], **(DFLASH2 if kind == "dflash2" else {})}
    optional = {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}
    inner = {name: value for name, value in config.items() if name in nested or name in optional}
    outer = {name: value for name, value in config.items() if name not in inner}
    architecture = "DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"
    sizes = {**SIZES, "architectures": [architecture], **outer, "dflash_config": {**nested, **inner}}
    kinds = sizes["layer_types"]
    if isinstance(kinds, str) or "layer_types" not in config:
        one = kinds if isinstance(kinds, str) else kinds[0]
        sizes["layer_types"] = [one] * sizes["num_hidden_layers"]
    if "sliding_attention" in sizes["layer_types"]:
        sizes = {"sliding_window": 12, "use_sliding_window": True, **sizes}
    return sizes


def random_tensors(sizes: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, in float32."""
    generator = torch.Generator().manual_seed(seed)
    nested = sizes["dflash_config"]
    h, inner, vocab, d = (sizes[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = sizes["num_attention_heads"] * d, sizes["num_key_value_heads"] * d

    def wide(*shape: int, spread: float = 0.1) -> torch.Tensor:
        return spread * torch.randn(shape, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return 1 + wide(size)

    tensors = {
        "fc.weight": wide(h, len(nested["target_layer_ids"]) * sizes.get("target_hidden_size", h)),
        "hidden_norm.weight": norm(h),
        "norm.weight": norm(h),
    }
    for i in range(sizes["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": norm(h),
            "post_attention_layernorm.weight": norm(h),
            "self_attn.q_norm.weight": norm(d),
            "self_attn.k_norm.weight": norm(d),
        }
        attention = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        mlp = {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}
        layer |= {f"self_attn.{name}_proj.weight": wide(*shape) for name, shape in attention.items()}
        layer |= {f"mlp.{name}_proj.weight": wide(*shape) for name, shape in mlp.items()}
        if sizes["attention_bias"]:
            layer |= {f"self_attn.{name}_proj.bias": wide(shape[0], spread=0.3) for name, shape in attention.items()}
        if "conv_kernel_size" in nested:
            taps, groups = nested["conv_kernel_size"], h // nested["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                base = wide(2, taps, h, spread=0.3)
                base[:, 0] += 1  # the row itself counts most, as in trained ones
                layer[f"{name}.base_kernel"] = base
                layer[f"{name}.kernel_projection.weight"] = wide(2 * taps * groups, h, spread=0.03)
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.items()}
    if "selector_rank" in nested:
        rank = nested["selector_rank"]
        tensors["candidate_selector.hidden_projection.weight"] = wide(rank, h)
        tensors["candidate_selector.predecessor_codebook"] = wide(vocab, rank, spread=1.0)
        tensors["candidate_selector.successor_codebook"] = wide(vocab, rank, spread=1.0)
    return tensors
