"""The shape of a decoder, read from a Hugging Face folder's config.json and checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError
from services.model.families import FAMILIES, Family
from services.model.rope_parameters import RopeParameters, context_length, positive, read_rope


@dataclass(frozen=True)
class Arch:
    """Sizes and constants of a dense decoder, in the names of its config.json."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """Positions the model can use, what its rope scaling adds included."""
    rope: RopeParameters
    rms_norm_eps: float
    tied_head: bool
    config_dtype: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key are normalised before they are rotated."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def keys_per_row(self) -> float:
        """Keys whose attention takes as many multiplications as the linear layers of one row."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)  # q, k, v, out
        weights = self.hidden_size * (heads + 3 * self.intermediate_size)
        return weights / (2 * self.num_heads * self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def read_arch(folder: Path) -> Arch:
    """Reads and checks `folder`/config.json. Raises CheckpointError naming file and key."""
    path = folder / "config.json"
    config = read_json(path)

    def need(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive integer")
        return value

    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(f"{path}: model_type is {name!r}, supported are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    _refuse(config, path)
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    kv_heads = need("num_key_value_heads", family.num_kv_heads or heads)
    if heads % kv_heads or (config.get("head_dim") is None and hidden % heads and not family.head_dim):
        raise CheckpointError(
            f"{path}: num_attention_heads {heads} does not divide into num_key_value_heads {kv_heads} "
            f"and hidden_size {hidden}"
        )
    head_dim = need("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim is {head_dim}, expected an even number")
    rope = read_rope(config, path)
    return Arch(
        family=name,
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=need("vocab_size"),
        max_position=context_length(rope, need("max_position_embeddings")),
        rope=rope,
        rms_norm_eps=positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        config_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        **_biases(family, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _refuse(config: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError for what would be computed wrongly."""
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act is {config['hidden_act']!r}, supported is 'silu'")
    if config.get("use_sliding_window"):
        raise CheckpointError(f"{path}: use_sliding_window is {config['use_sliding_window']!r}, supported is false")
    kinds = config.get("layer_types") or []
    odd = next((kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "full_attention"), None)
    if odd is not None:
        raise CheckpointError(f"{path}: layer_types has {odd!r}, supported is 'full_attention'")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise CheckpointError(f"{path}: quantization_config is of method {method!r}, supported are plain weights")


def _biases(family: Family, config: dict[str, Any]) -> dict[str, bool]:
    """Which projections have a bias, and whether heads are normalised, as fields of Arch."""
    attention = family.attention_bias and bool(config.get("attention_bias"))
    return {
        "qkv_bias": family.qkv_bias or attention,
        "out_bias": attention,
        "mlp_bias": family.mlp_bias and bool(config.get("mlp_bias")),
        "qk_norm": family.qk_norm,
    }
