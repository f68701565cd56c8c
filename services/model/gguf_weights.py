"""A Llama-architecture GGUF file as Hugging Face configuration and bfloat16 tensors (numpy, no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from kadence.errors import CheckpointError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file: its metadata by key, and its tensors by name (numpy views on the mapped file)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def get(self, key: str) -> Any:
        """One metadata value; CheckpointError names the file and the key if it is absent."""
        if key not in self.metadata:
            raise CheckpointError(f"{self.path}: metadata key {key} is missing")
        return self.metadata[key]


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file. Raises CheckpointError if it is no GGUF file, is damaged or is not of Llama architecture."""
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    # The reader maps the file and slices it; damage shows as whatever numpy or struct stumbles over.
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable GGUF file ({error})") from error
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: general.architecture is {architecture!r}, only 'llama' can be converted")
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def config(file: GGUFFile) -> dict[str, Any]:
    """The config.json of the model. Raises CheckpointError naming a missing key."""
    hidden, heads = file.get("llama.embedding_length"), file.get("llama.attention.head_count")
    eos = file.get("tokenizer.ggml.eos_token_id")
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(f"{file.path}: llama.rope.scaling.type is {scaling!r}, only 'none' can be converted")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "head_dim": file.metadata.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": file.get("llama.feed_forward_length"),
        "max_position_embeddings": file.get("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": file.get("llama.block_count"),
        "num_key_value_heads": file.metadata.get("llama.attention.head_count_kv", heads),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id", eos),
        "rms_norm_eps": _shortest(file.get("llama.attention.layer_norm_rms_epsilon")),
        "rope_scaling": None,
        "rope_theta": _shortest(file.metadata.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "vocab_size": len(file.get("tokenizer.ggml.tokens")),
    }


def tensors(file: GGUFFile, cfg: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, float32 array in Hugging Face order) for every tensor of the file.

    Raises CheckpointError naming the tensor that is missing, unknown or of another shape than `cfg` demands.
    """
    expected = expected_shapes(cfg)
    names = {name: _hugging_face_name(file, name) for name in file.tensors}
    for name in expected.keys() - names.values():
        raise CheckpointError(f"{file.path}: tensor {name} is missing")
    for name, target in names.items():
        if target not in expected:
            raise CheckpointError(f"{file.path}: tensor {name} is not one of this configuration's")
        tensor = file.tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.shape != expected[target]:
            raise CheckpointError(f"{file.path}: tensor {name} has shape {values.shape}, expected {expected[target]}")
        if ".attn_q." in name:
            values = unpermute(values, cfg["num_attention_heads"])
        elif ".attn_k." in name:
            values = unpermute(values, cfg["num_key_value_heads"])
        yield target, values


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection (heads * head_dim, hidden) from GGUF order to Hugging Face order.

    GGUF keeps the two numbers that rotate together side by side; Hugging Face keeps all first halves, then all second.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16(values: np.ndarray) -> bytes:
    """float32 values as little-endian bfloat16 bytes, rounded to nearest, ties to even; values must be finite."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2").tobytes()


def _hugging_face_name(file: GGUFFile, name: str) -> str:
    """The Hugging Face name of a GGUF tensor; CheckpointError if the architecture has no such tensor."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise CheckpointError(f"{file.path}: tensor {name} is not one of the llama architecture")


def expected_shapes(cfg: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by Hugging Face name, with its shape."""
    hidden, inner, dim = cfg["hidden_size"], cfg["intermediate_size"], cfg["head_dim"]
    q, kv = cfg["num_attention_heads"] * dim, cfg["num_key_value_heads"] * dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, q),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (cfg["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not cfg["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (cfg["vocab_size"], hidden)
    for index in range(cfg["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{_LAYER_NAMES[part]}.weight": shape for part, shape in layer.items()}
    return shapes


def _shortest(value: float) -> float:
    """The float64 that a person would have written for a float32 from the file (1e-05, not 9.999999747e-06)."""
    return float(str(np.float32(value)))
