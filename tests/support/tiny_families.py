"""Configurations of tiny checkpoints, one for each family and rope variant that can be run."""

from __future__ import annotations

from typing import Any

ORIGINAL = 64
"""Positions that the scaled variants count as trained."""

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0}
_QWEN3 = {"model_type": "qwen3", "head_dim": 32}


def _scaled(**rope: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL, **rope}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama llama3": {"rope_parameters": _scaled(**_LLAMA3), "tie_word_embeddings": True},
    "llama yarn": {"rope_parameters": _scaled(**_YARN)},
    "llama biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 8, "tie_word_embeddings": True},
    "qwen2 yarn": {"model_type": "qwen2", "rope_parameters": _scaled(**_YARN, attention_factor=1.3)},
    # 4 heads of 32 out of a hidden size of 64.
    "qwen3": {**_QWEN3, "shard": "50KB"},
    "qwen3 tied": {**_QWEN3, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3 yarn": {**_QWEN3, "rope_parameters": _scaled(**_YARN, truncate=False), "shard": "100KB"},
}
"""Arguments of TinyLlama. The hidden size is 64; some have tied heads, some come in several files."""
