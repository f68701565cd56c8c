"""Damaged, incomplete and foreign checkpoints: one line that names file and tensor; and what a fingerprint sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kadence.errors import CheckpointError
from services.model.weights import Checkpoint
from services.verifier.target import Target
from tests.support.tiny_llama import TinyLlama

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tiny_llama: TinyLlama, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    for file in tiny_llama.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, what: Callable[[Tensors], object], file: str = "model.safetensors") -> None:
    tensors = load_file(folder / file)
    what(tensors)
    save_file(tensors, folder / file)


def shard(folder: Path) -> None:
    """Splits the checkpoint in two files and an index, the second layer in the second."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{2 if '.layers.1.' in name else 1}-of-00002.safetensors" for name in whole}
    for file in sorted(set(where.values())):
        save_file({name: whole[name] for name in whole if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def refused(folder: Path) -> str:
    """The error's message: one line that names a file of this folder."""
    with pytest.raises(CheckpointError) as caught:
        Target(folder, "float32")
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(folder)), message
    return message.removeprefix(f"{folder}/")


def test_whole_checkpoints_load(folder: Path) -> None:
    one = Target(folder, "float32").fingerprint
    shard(folder)
    assert Target(folder, "float32").fingerprint == one


def test_missing_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(DOWN))
    assert refused(folder) == f"model.safetensors: tensor {DOWN} is missing"


def test_missing_tensor_of_a_shard(folder: Path) -> None:
    shard(folder)
    change(folder, lambda tensors: tensors.pop(DOWN), "model-00002-of-00002.safetensors")
    assert refused(folder) == f"model.safetensors.index.json: tensor {DOWN} is missing"


def test_wrong_shape(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()}))
    assert refused(folder) == f"model.safetensors: tensor {DOWN} has shape [96, 64], expected [64, 96]"


def test_wrong_shape_of_the_same_size(folder: Path) -> None:
    norm = "model.norm.weight"
    change(folder, lambda tensors: tensors.update({norm: tensors[norm].view(8, 8)}))
    assert refused(folder) == f"model.safetensors: tensor {norm} has shape [8, 8], expected [64]"


def test_wrong_dtype(folder: Path) -> None:
    change(folder, lambda tensors: tensors.update({DOWN: torch.zeros(64, 96, dtype=torch.int8)}))
    assert refused(folder) == f"model.safetensors: tensor {DOWN} has dtype torch.int8, expected floating point"


def test_unexpected_tensor(folder: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    change(folder, lambda tensors: tensors.update({bias: torch.zeros(64), "z": torch.zeros(1)}))
    assert refused(folder) == f"model.safetensors: unexpected tensor {bias} (2 in all)"


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    """In its length, in its header, in its last tensor."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert refused(folder).startswith("model.safetensors: damaged or not a safetensors file (")


def test_not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert refused(folder).startswith("model.safetensors: damaged or not a safetensors file (")


def test_missing_file_and_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert refused(folder) == "model-00002-of-00002.safetensors: no such file"
    (folder / "model.safetensors.index.json").unlink()
    assert refused(folder) == "model.safetensors: no such file"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not readable as JSON"),
        ("{}", "weight_map is missing"),
        ('{"weight_map": {}}', "weight_map is missing"),
        ('{"weight_map": {"a": 3}}', "weight_map names 3, expected file names"),
    ],
)
def test_unusable_index(folder: Path, content: str, says: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    assert refused(folder).startswith(f"model.safetensors.index.json: {says}")


def test_missing_folder(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere") == "config.json: no such file"


def test_tied_head_may_come_twice_an_untied_one_must_be_there(tmp_path: Path) -> None:
    TinyLlama(tmp_path, tie_word_embeddings=True)
    tied = Target(tmp_path, "float32").fingerprint
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert Target(tmp_path, "float32").fingerprint == tied
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert Target(tmp_path, "float32").fingerprint != tied
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert refused(tmp_path) == "model.safetensors: tensor lm_head.weight is missing"


def test_fingerprint_sees_every_tensor_and_the_config(folder: Path) -> None:
    seen = {Target(folder, "float32").fingerprint}
    assert Target(folder, "bfloat16").fingerprint in seen  # of the checkpoint, not of how it is run
    names = list(load_file(folder / "model.safetensors"))
    for name in names:
        change(folder, lambda tensors, name=name: tensors[name].view(-1)[:1].mul_(1.001))  # type: ignore[misc]
        seen.add(Target(folder, "float32").fingerprint)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    seen.add(Target(folder, "float32").fingerprint)
    assert len(seen) == len(names) + 2


def test_fingerprint_sees_storage_dtype(folder: Path) -> None:
    before = Target(folder, "float32").fingerprint
    change(folder, lambda tensors: tensors.update({DOWN: tensors[DOWN].bfloat16()}))
    assert Target(folder, "float32").fingerprint != before


def test_samples_of_large_tensors_are_spread(tmp_path: Path) -> None:
    """A change anywhere shows if it is wide enough; the sample is not just the beginning."""
    (tmp_path / "config.json").write_text("{}")
    large = torch.randn(1000, 512)

    def fingerprint() -> str:
        save_file({"large": large}, tmp_path / "model.safetensors")
        with Checkpoint(tmp_path) as checkpoint:
            checkpoint.take("large", (1000, 512), torch.float32)
            return checkpoint.finish()

    seen = [fingerprint()]
    for part in (large[0], large[500], large[999], large[:, 0], large[:, 1], large[:, 511]):
        part += 1
        seen.append(fingerprint())
    assert len(set(seen)) == 7


def test_values_are_those_of_the_file(folder: Path) -> None:
    wanted = load_file(folder / "model.safetensors")[DOWN]
    with Checkpoint(folder) as checkpoint:
        assert torch.equal(checkpoint.take(DOWN, (64, 96), torch.float32), wanted)
        assert torch.equal(checkpoint.take(DOWN, (64, 96), torch.bfloat16), wanted.bfloat16())


def test_fingerprint_knows_no_order(folder: Path) -> None:
    """Nor does it matter whether tensors are kept."""
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    seen = {Target(folder, "float32").fingerprint}
    for names in (sorted(shapes), sorted(shapes, reverse=True), [DOWN], []):
        with Checkpoint(folder) as checkpoint:
            for name in names:
                checkpoint.take(name, shapes[name], torch.float32)
            seen.add(checkpoint.fingerprint())
    assert len(seen) == 1
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.fingerprint(ignore=[DOWN]) not in seen
