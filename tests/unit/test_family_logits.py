"""Checkpoints of every family and rope variant give the logits that transformers computes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.model.linear import Linear
from services.verifier.target import Target
from tests.support.prefill import prefill
from tests.support.tiny_families import FAMILIES, ORIGINAL
from tests.support.tiny_llama import TinyLlama

LENGTH = 3 * ORIGINAL


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In float32 also beyond the original positions; in bfloat16 to its rounding, biases and norms included."""
    model = TinyLlama(tmp_path, seed=11, **FAMILIES[family])
    sharded, tied = (FAMILIES[family].get(key) is not None for key in ("shard", "tie_word_embeddings"))
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    tokens = torch.randint(0, 330, (LENGTH,), generator=torch.Generator().manual_seed(12)).tolist()
    wanted = model.logits(tokens)
    assert wanted.std() > 0.3
    target = Target(tmp_path, "float32")
    assert target.arch.tied_head == tied
    torch.testing.assert_close(prefill(target, tokens), wanted, rtol=1e-4, atol=1e-4)
    # Attention over long contexts multiplies what bfloat16 rounds away; short ones are good to a few percent.
    rough = prefill(Target(tmp_path, "bfloat16"), tokens[:32], page_size=16).float()
    assert (rough - wanted[:32]).square().mean().sqrt() < 0.05 * wanted.std()


def test_packed_layers_add_their_bias(tmp_path: Path) -> None:
    """The bfloat16 comparison above is one of the packed path where this machine has it."""
    TinyLlama(tmp_path, **FAMILIES["qwen2"])
    target = Target(tmp_path, "bfloat16")
    qkv = target._layers[0].qkv
    assert qkv.packed == Linear(torch.zeros(4, 4, dtype=torch.bfloat16)).packed and qkv.bias is not None
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert torch.equal(qkv(x), qkv.bias.expand(3, -1)) and qkv.bias.abs().max() > 0.1


@pytest.mark.parametrize("key", ["rope_theta", "factor", "attention_factor"])
def test_scaling_matters(key: str, tmp_path: Path) -> None:
    """The comparison with transformers would notice a scaling that is left out."""
    model = TinyLlama(tmp_path, seed=11, **FAMILIES["qwen2 yarn"])
    tokens = torch.randint(0, 330, (LENGTH,), generator=torch.Generator().manual_seed(12)).tolist()
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"][key] *= 1.1
    path.write_text(json.dumps(config))
    off = (prefill(Target(tmp_path, "float32"), tokens) - model.logits(tokens)).abs().max()
    assert off > 0.01
