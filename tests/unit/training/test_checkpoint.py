"""Drafters on their way out and back: the published format, readable by what serves them and by the package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from kadence.errors import CheckpointError
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.drafter.draft_vocabulary import read_draft_vocabulary
from services.drafter.draft_weights import load_draft
from tests.support.tiny_drafter import write_drafter
from training import checkpoint
from training.model import DraftModel

VOCAB, HIDDEN = 330, 64
RANKED = [(i * 7) % VOCAB for i in range(VOCAB)]
VOCABULARY = torch.tensor(sorted(RANKED[:50]))
KINDS = {
    "dflash2": {},
    "dflash": {"conv_taps": 0, "conv_group": 0, "selector_rank": 0},
    "without convolutions": {"conv_taps": 0, "conv_group": 0},
    "without selector": {"selector_rank": 0},
}


def arch_of(folder: Path, kind: str = "dflash2") -> DraftArch:
    return replace(read_draft_arch(write_drafter(folder)), kind=kind.split()[0], **KINDS[kind])


def random_model(arch: DraftArch, seed: int = 0) -> DraftModel:
    model = DraftModel(arch, torch.zeros(VOCAB, HIDDEN), len(VOCABULARY))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def rounded(model: DraftModel) -> dict[str, Tensor]:
    return {name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, tmp_path: Path) -> None:
    arch = arch_of(tmp_path / "any", kind)
    model, folder = random_model(arch), tmp_path / "saved"
    checkpoint.save(model, folder, VOCABULARY, RANKED)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "draft_vocabulary.json", "model.safetensors")
    ]
    read = read_draft_arch(folder)
    kept = arch if arch.selector_rank else replace(arch, selector_top_k=16)
    assert read == replace(kept, kind="dflash" if kind == "dflash" else "dflash2")
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(folder / "model.safetensors").values())
    load_draft(folder, read, torch.float32)  # every tensor is there, and none too many
    assert torch.equal(read_draft_vocabulary(folder / "draft_vocabulary.json", 50, VOCAB), VOCABULARY)
    back = random_model(arch, seed=1)
    assert checkpoint.load(back, folder, VOCABULARY) == []
    for name, tensor in rounded(model).items():
        assert torch.equal(back.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_the_package_reads_it(kind: str, tmp_path: Path) -> None:
    model, folder = random_model(arch_of(tmp_path / "any", kind)), tmp_path / "saved"
    checkpoint.save(model, folder, VOCABULARY, RANKED)
    package = {"dflash2": DFlash2DraftModel, "dflash": DFlashDraftModel}[kind].from_pretrained(
        folder, dtype=torch.float32
    )
    theirs = {name.replace("codebook.weight", "codebook"): tensor for name, tensor in package.state_dict().items()}
    mine = rounded(model)
    assert set(theirs) == set(mine)
    for name, tensor in mine.items():
        assert torch.equal(theirs[name][VOCABULARY] if name.endswith("codebook") else theirs[name], tensor), name


def test_codebooks_of_a_draft_vocabulary(tmp_path: Path) -> None:
    """Rows of ids that are never drafted are zero: such a predecessor changes no score."""
    model = random_model(arch_of(tmp_path / "any"))
    checkpoint.save(model, tmp_path, VOCABULARY, RANKED)
    stored, mine = load_file(tmp_path / "model.safetensors"), rounded(model)
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        for token in range(VOCAB):
            wanted = mine[name][VOCABULARY.tolist().index(token)] if token in VOCABULARY.tolist() else torch.zeros(8)
            assert torch.equal(stored[name][token].float(), wanted)


def test_another_vocabulary_takes_its_rows(tmp_path: Path) -> None:
    arch = arch_of(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["candidate_selector.successor_codebook"]
    model = random_model(arch)
    checkpoint.load(model, tmp_path, VOCABULARY)
    assert model.candidate_selector is not None
    assert torch.equal(model.candidate_selector.successor_codebook, stored[VOCABULARY])


def test_what_is_missing_keeps_its_values(tmp_path: Path) -> None:
    arch = arch_of(tmp_path / "two")
    write_drafter(tmp_path / "one", "dflash", num_hidden_layers=1)
    model = random_model(arch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    missing = checkpoint.load(model, tmp_path / "one", VOCABULARY)
    stored, after = load_file(tmp_path / "one" / "model.safetensors"), model.state_dict()
    assert set(missing) == set(before) - set(stored) and "layers.1.mlp.up_proj.weight" in missing
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name] if name in missing else stored[name]), name


def test_refuses_other_layers_and_mask_token(tmp_path: Path) -> None:
    arch = arch_of(tmp_path)
    for change, named in (
        ({"taps": (0, 1)}, r"target_layer_ids is \[0, 2\], training is for \[0, 1\]"),
        ({"mask_token_id": 5}, "mask_token_id is 329, training is for 5"),
    ):
        with pytest.raises(CheckpointError, match=named) as caught:
            checkpoint.load(random_model(replace(arch, **change)), tmp_path, VOCABULARY)
        assert str(caught.value).startswith(str(tmp_path / "config.json"))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape"):
        checkpoint.load(random_model(replace(arch, intermediate_size=32)), tmp_path, VOCABULARY)


def test_begins_as_the_targets_last_layers(tmp_path: Path) -> None:
    """Layer i of L is that of the target's layer N - L + i, but for queries and keys."""
    arch = arch_of(tmp_path / "draft")
    h, inner, q, kv = 64, 96, 64, 32
    shapes = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        **{f"self_attn.{name}_proj": shape for name, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)))},
        "self_attn.o_proj": (h, q),
        **{f"mlp.{name}_proj": shape for name, shape in (("gate", (inner, h)), ("up", (inner, h)))},
        "mlp.down_proj": (h, inner),
    }
    tensors = {f"model.layers.{i}.{n}.weight": torch.randn(shape) for i in range(4) for n, shape in shapes.items()}
    tensors["model.norm.weight"] = torch.randn(h)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    model = random_model(arch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name in before if name != "layers.1.mlp.down_proj.weight"]
    checkpoint.load_target(model, tmp_path, names)
    taken = set()
    for name, tensor in model.state_dict().items():
        for layer in (0, 1):
            source = name.replace(f"layers.{layer}", f"model.layers.{2 + layer}")
            if source in tensors and torch.equal(tensor, tensors[source]):
                taken.add(name)
        if name not in taken and name != "norm.weight":
            assert torch.equal(tensor, before[name]), name
    assert torch.equal(model.state_dict()["norm.weight"], tensors["model.norm.weight"])
    wanted = {f"layers.{i}.{n}.weight" for i in (0, 1) for n in shapes if n[-6:] not in ("q_proj", "k_proj")}
    assert taken == wanted - {"layers.1.mlp.down_proj.weight"}
