"""What a drafter reads of its target: the verifier's fingerprint, the right tables, and who it refuses to draft for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kadence.errors import ConfigError
from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_weights import load_draft
from services.drafter.target_tables import TargetTables, load_target_tables
from services.verifier.target import Target
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("target"), num_hidden_layers=TARGET_LAYERS)


@pytest.fixture(scope="module")
def tables(target: TinyLlama) -> TargetTables:
    return load_target_tables(target.folder, torch.float32)


def check(tables: TargetTables, folder: Path, **config: Any) -> None:
    write_drafter(folder, **config)
    tables.check(load_draft(folder, read_draft_arch(folder), torch.float32))


def test_tables_and_sizes(target: TinyLlama, tables: TargetTables) -> None:
    assert torch.equal(tables.embedding, target.model.get_input_embeddings().weight)
    assert torch.equal(tables.head, target.model.lm_head.weight)
    assert (tables.num_layers, tables.hidden_size, tables.vocab_size) == (TARGET_LAYERS, 64, 330)


def test_fingerprint_is_the_verifiers(tmp_path: Path, target: TinyLlama, tables: TargetTables) -> None:
    assert tables.fingerprint == Target(target.folder, "float32").fingerprint
    TinyLlama(tmp_path, tie_word_embeddings=True, shard="100KB")
    tied = load_target_tables(tmp_path, torch.bfloat16)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert tied.fingerprint == Target(tmp_path, "bfloat16").fingerprint != tables.fingerprint
    assert tied.head is tied.embedding and tied.embedding.dtype == torch.bfloat16


def test_a_drafter_of_this_target(tmp_path: Path, tables: TargetTables) -> None:
    check(tables, tmp_path)
    own = {name: torch.zeros(330, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    check(tables, tmp_path / "own", hidden_size=32, target_hidden_size=64, tensors=own)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"vocab_size": 331}, "drafter's vocab_size is 331, the model's is 330: it was made for another model"),
        ({"num_target_layers": 6}, "drafter's num_target_layers is 6, the model's is 4: it was made for another model"),
        ({"target_hidden_size": 96}, "drafter's target_hidden_size is 96, the model's is 64: it was made for another"),
        ({"hidden_size": 32, "target_hidden_size": 64}, "drafter's hidden_size is 32, the model's is 64: it was made"),
        (
            {"num_target_layers": None, "target_layer_ids": [0, 3]},
            "drafter reads layer outputs [0, 3], the model has 4 layers: at most 2 can be read",
        ),
    ],
)
def test_a_drafter_of_another(tmp_path: Path, tables: TargetTables, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(tables, tmp_path, **config)
    assert str(caught.value).startswith(says)
