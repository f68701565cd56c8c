"""The shape of a decoder, read from a Hugging Face folder's config.json and checked before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError

FAMILIES = ("llama",)


@dataclass(frozen=True)
class Arch:
    """Sizes and constants of a Llama-family decoder, in the names of its config.json."""

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rope_theta: float
    rms_norm_eps: float
    tied_head: bool
    eos_ids: tuple[int, ...]
    config_dtype: str

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

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

    family = config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"{path}: model_type is {family!r}, supported are {', '.join(FAMILIES)}")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(f"{path}: {key} is true, which is not supported yet")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act is {config['hidden_act']!r}, supported is 'silu'")
    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    kv_heads = need("num_key_value_heads", heads)
    if heads % kv_heads or (config.get("head_dim") is None and hidden % heads):
        raise CheckpointError(
            f"{path}: num_attention_heads {heads} does not divide into num_key_value_heads {kv_heads} "
            f"and hidden_size {hidden}"
        )
    head_dim = need("head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{path}: head_dim is {head_dim}, expected an even number")
    return Arch(
        family=family,
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=need("vocab_size"),
        max_position=need("max_position_embeddings"),
        rope_theta=_rope_theta(config, path),
        rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(folder, config),
        config_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
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


def _positive(value: Any, key: str, path: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive number")
    return float(value)


def _rope_theta(config: dict[str, Any], path: Path) -> float:
    """theta of plain rotary embedding, in either of the spellings transformers has used."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{path}: {key} is {rope!r}, expected an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"{path}: rope type {kind!r} is not supported yet, supported is 'default'")
    return _positive(rope.get("rope_theta") or config.get("rope_theta") or 10000.0, "rope_theta", path)


def _eos_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """All ids that end an answer: the generation config's, else the model config's."""
    path, value = folder / "config.json", config.get("eos_token_id")
    generation = folder / "generation_config.json"
    if generation.exists() and (its := read_json(generation).get("eos_token_id")) is not None:
        path, value = generation, its
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}, expected ids")
    return tuple(ids)
