"""Tiny random checkpoints of every family and every kind of rope, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

_POSITIONS, _TRAINED = 1024, 128
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": _POSITIONS,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, linear rope": ("llama", _rope("linear", factor=4.0)),
    "Llama, llama3 rope": ("llama", _rope("llama3", original_max_position_embeddings=_TRAINED, **_LLAMA3)),
    "Llama, yarn rope": ("llama", _rope("yarn", original_max_position_embeddings=_TRAINED, factor=8.0)),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"head_dim": 32}),
}


def write(folder: Path, name: str, seed: int = 0) -> None:
    """Writes the checkpoint CASES[name] into `folder`, sharded, with a tokenizer of single bytes.

    Weights are wide, so that logits differ and attention is sharp: a wrong rotation changes the ids.
    """
    family, config = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SIZES, **config})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.15 * noise)
    model.save_pretrained(folder, max_shard_size="100KB")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
