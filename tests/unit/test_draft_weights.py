"""A drafter's tensors: the exact set of its family under any naming, and one line for what is missing or too much."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kadence.errors import CheckpointError
from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_weights import DraftWeights, build_draft, load_draft
from services.model.linear import Linear
from tests.support.tiny_drafter import write_drafter

Tensors = dict[str, torch.Tensor]
Q, KV, H, V = 64, 32, 64, 330  # of the tiny drafter: 4 heads and 2 KV heads of 16
SELECTOR = "candidate_selector."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_drafter(tmp_path)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DraftWeights:
    return load_draft(folder, read_draft_arch(folder), dtype)


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def change(folder: Path, what: Callable[[Tensors], object]) -> None:
    tensors = tensors_of(folder)
    what(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename(folder: Path, name: Callable[[str], str]) -> None:
    save_file({name(old): tensor for old, tensor in tensors_of(folder).items()}, folder / "model.safetensors")


def refused(folder: Path) -> str:
    """The error's message: one line that begins with a path in this folder."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(str(folder)), message
    return message.removeprefix(str(folder)).lstrip("/")


def dense(linear: Linear) -> torch.Tensor:
    """The weight, out of what the layer makes of unit vectors."""
    bias = 0 if linear.bias is None else linear.bias
    return (linear(torch.eye(linear.in_features)) - bias).T


def same(one: DraftWeights, other: DraftWeights) -> bool:
    """All tensors are equal."""
    return all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


def flat(weights: DraftWeights) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list):
            for one in value:
                walk(one)
        elif hasattr(value, "__dict__"):
            for key in sorted(vars(value)):
                walk(vars(value)[key])

    walk(weights)
    assert len(found) > 30
    return found


@pytest.mark.parametrize(("kind", "layers", "count"), [("dflash", 5, 58), ("dflash2", 5, 81), ("dflash2", 3, 51)])
def test_inventory_of_the_published_size(tmp_path: Path, kind: str, layers: int, count: int) -> None:
    """58 and 81 tensors for five layers (draft-model contracts, sections 2.1 and 2.2)."""
    write_drafter(tmp_path, kind, num_hidden_layers=layers)
    names = list(tensors_of(tmp_path))
    assert len(names) == count and len(load(tmp_path).layers) == layers
    for name in names:
        change(tmp_path, lambda t, name=name: t.update({"kept": t.pop(name)}))  # type: ignore[misc]
        assert refused(tmp_path) == f"model.safetensors: tensor {name} is missing"
        change(tmp_path, lambda t, name=name: t.update({name: t.pop("kept")}))  # type: ignore[misc]


def test_every_shape_is_checked(folder: Path) -> None:
    for name, tensor in tensors_of(folder).items():
        wrong = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
        change(folder, lambda t, name=name, wrong=wrong: t.update({name: wrong}))  # type: ignore[misc]
        shapes = f"has shape {list(wrong.shape)}, expected {list(tensor.shape)}"
        assert refused(folder) == f"model.safetensors: tensor {name} {shapes}"
        change(folder, lambda t, name=name, tensor=tensor: t.update({name: tensor}))  # type: ignore[misc]


def test_values_and_fusion(tmp_path: Path) -> None:
    write_drafter(tmp_path, attention_bias=True)
    stored, weights = tensors_of(tmp_path), load(tmp_path)
    layer, prefix = weights.layers[1], "layers.1."
    q, k, v = (stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
    bias = [stored[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]
    assert torch.allclose(dense(layer.qkv), torch.cat([q, k, v]), atol=1e-6)
    assert torch.allclose(dense(layer.kv), torch.cat([k, v]), atol=1e-6)
    assert layer.qkv.bias is not None and torch.equal(layer.qkv.bias, torch.cat(bias))
    assert layer.kv.bias is not None and torch.equal(layer.kv.bias, torch.cat(bias[1:]))
    assert layer.out.bias is not None and layer.gate_up.bias is None and layer.down.bias is None
    gate, up = (stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.allclose(dense(layer.gate_up), torch.cat([gate, up]), atol=1e-6)
    assert layer.attention_conv is not None and layer.mlp_conv is not None
    assert torch.equal(layer.mlp_conv.base, stored[f"{prefix}mlp_conv.base_kernel"])
    assert layer.attention_conv.group == 16 and layer.attention_conv.projection.out_features == 2 * 2 * 4
    assert weights.selector is not None
    assert torch.equal(weights.selector.successor, stored[f"{SELECTOR}successor_codebook"])
    heads = torch.randn(3, 6, 16)
    normed = torch.nn.functional.rms_norm(heads, (16,), None, 1e-6)
    by_norm = {name: normed * stored[f"{prefix}self_attn.{name}_norm.weight"] for name in "qk"}
    assert torch.allclose(layer.qk_norm(heads), torch.cat([by_norm["q"][:, :4], by_norm["k"][:, 4:]], 1), atol=1e-5)
    assert torch.allclose(layer.k_norm(heads[:, :2]), by_norm["k"][:, :2], atol=1e-5)


def test_dtype_is_the_callers_but_the_projection_stays_as_stored(tmp_path: Path) -> None:
    write_drafter(tmp_path, dtype=torch.bfloat16)
    wide, narrow = load(tmp_path), load(tmp_path, torch.bfloat16)
    assert wide.selector is not None and wide.selector.predecessor.dtype == torch.float32
    assert wide.projection.fc.dtype == narrow.projection.fc.dtype == torch.bfloat16
    assert wide.projection.fingerprint == narrow.projection.fingerprint
    assert torch.equal(narrow.projection.norm, tensors_of(tmp_path)["hidden_norm.weight"])
    assert wide.projection.taps == (0, 2) and tuple(wide.projection.fc.shape) == (H, 2 * H)


@pytest.mark.parametrize(
    "name",
    [
        lambda name: f"model.{name}",
        lambda name: f"{name}.weight" if "codebook" in name else name,
        lambda name: f"logit_head.{name}" if "selector" in name else name,
        lambda name: name.replace("layers.0.", "midlayer."),
        lambda name: f"model.{name}".replace("layers.0.", "midlayer."),
    ],
)
def test_names_seen_in_published_files(folder: Path, name: Callable[[str], str]) -> None:
    plain = load(folder)
    rename(folder, name)
    assert same(load(folder), plain)


def test_fused_attention(tmp_path: Path) -> None:
    def fuse(tensors: Tensors) -> None:
        for i in range(2):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"layers.{i}.self_attn.{name}_proj.{kind}") for name in "qkv"]
                tensors[f"layers.{i}.self_attn.qkv_proj.{kind}"] = torch.cat(parts)

    write_drafter(tmp_path, attention_bias=True)
    plain = load(tmp_path)
    change(tmp_path, fuse)
    assert same(load(tmp_path), plain)
    change(tmp_path, lambda t: t.update({"layers.1.self_attn.qkv_proj.weight": torch.zeros(Q + KV, H)}))
    name = "layers.1.self_attn.qkv_proj.weight"
    assert refused(tmp_path) == f"model.safetensors: tensor {name} has shape [96, 64], expected [128, 64]"


def test_unexpected_tensors(folder: Path) -> None:
    change(folder, lambda t: t.update({"markov_head.markov_w1.weight": torch.zeros(V, 4), "z": torch.zeros(1)}))
    assert refused(folder) == "model.safetensors: unexpected tensor markov_head.markov_w1.weight (2 in all)"


def test_a_bias_the_config_does_not_know(folder: Path) -> None:
    name = "layers.0.self_attn.q_proj.bias"
    change(folder, lambda t: t.update({name: torch.zeros(Q)}))
    assert refused(folder) == f"model.safetensors: unexpected tensor {name} (1 in all)"


def test_a_tensor_under_two_names(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()}))
    assert refused(folder) == "model.safetensors: tensors fc.weight and model.fc.weight are the same"


def test_reduced_vocabulary_is_refused_by_its_tables(folder: Path) -> None:
    change(folder, lambda t: t.update({"d2t": torch.zeros(V, dtype=torch.int64)}))
    assert refused(folder) == "model.safetensors: unexpected tensor d2t (1 in all)"


def test_own_tables(tmp_path: Path) -> None:
    tables = {"embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.randn(V, H)}
    weights = load(write_drafter(tmp_path / "own", tensors=tables))
    assert weights.embedding is not None and torch.equal(weights.embedding, tables["embed_tokens.weight"])
    assert weights.head is not None and torch.equal(weights.head, tables["lm_head.weight"])
    assert load(write_drafter(tmp_path / "none")).embedding is None
    write_drafter(tmp_path / "short", tensors={"lm_head.weight": torch.zeros(V - 1, H)})
    assert "tensor lm_head.weight has shape [329, 64], expected [330, 64]" in refused(tmp_path / "short")
    write_drafter(tmp_path / "said", has_embed_tokens=True)
    assert "tensor embed_tokens.weight is missing, but has_embed_tokens is true" in refused(tmp_path / "said")


def test_mask_embedding(tmp_path: Path) -> None:
    """Among the tensors, in a file of its own, alone or in an object; the file may also hold the id."""
    row = torch.randn(H)
    inside = write_drafter(tmp_path / "inside", tensors={"mask_embedding": row.view(1, H)}, mask_token_id=None)
    assert torch.equal(load(inside).mask_embedding, row)  # type: ignore[arg-type]
    beside = write_drafter(tmp_path / "beside", mask_token_id=None)
    assert refused(beside) == "config.json: mask_token_id is missing, and there is no mask_embedding.pt"
    for saved in (row, row.view(1, H), {"mask_token_id": 5, "embedding": row}):
        torch.save(saved, beside / "mask_embedding.pt")
        assert torch.equal(load(beside).mask_embedding, row)  # type: ignore[arg-type]
    torch.save(torch.zeros(H + 1), beside / "mask_embedding.pt")
    assert refused(beside) == ": the mask embedding has 65 values, expected hidden_size, 64"
    for odd in ([row], {"a": row, "b": row}, {}, torch.zeros(H, dtype=torch.int64)):
        torch.save(odd, beside / "mask_embedding.pt")
        assert refused(beside).startswith("mask_embedding.pt: expected one floating point tensor")
    torch.save(row, inside / "mask_embedding.pt")
    assert refused(inside) == ": a mask embedding is both among the tensors and in mask_embedding.pt"


class _Harm:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._path,)


def test_mask_file_runs_no_code(folder: Path) -> None:
    harm = folder / "harm"
    path = folder / "mask_embedding.pt"
    torch.save({"embedding": _Harm(str(harm))}, path)
    assert refused(folder) == "mask_embedding.pt: damaged, or more than tensors (UnpicklingError)"
    path.write_bytes(pickle.dumps(_Harm(str(harm)), protocol=2))
    assert refused(folder) == "mask_embedding.pt: damaged, or more than tensors (UnpicklingError)"
    assert not harm.exists()


def test_damaged_mask_file(folder: Path) -> None:
    path = folder / "mask_embedding.pt"
    torch.save(torch.randn(H), path)
    whole = path.read_bytes()
    for keep in (0, 1, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        assert refused(folder).startswith("mask_embedding.pt: damaged, or more than tensors (")


def test_mask_of_any_strides(folder: Path) -> None:
    square = torch.arange(H, dtype=torch.float32).view(8, -1)
    torch.save(square.T, folder / "mask_embedding.pt")
    assert torch.equal(load(folder).mask_embedding, square.T.reshape(H))  # type: ignore[arg-type]
    for odd in (torch.ones(H).to_sparse(), torch.ones(H, device="meta")):
        torch.save(odd, folder / "mask_embedding.pt")
        assert "expected plain numbers" in refused(folder)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", ["fc.weight", "layers.1.self_attn.v_proj.weight", "mask_embedding.pt"])
def test_numbers_that_are_not_finite(folder: Path, name: str, number: float) -> None:
    """Nothing that is computed with such a tensor is a draft, and a verifier would only see ones that make no sense."""
    if name == "mask_embedding.pt":
        torch.save(torch.full((H,), number), folder / name)
    else:
        tensors = load_file(folder / "model.safetensors")
        tensors[name][3, 5] = number
        save_file(tensors, folder / "model.safetensors")
    stored = name.removesuffix(".pt")
    assert refused(folder).endswith(f": tensor {stored} has numbers that are not finite as torch.float32")


def test_tensors_of_any_source(folder: Path) -> None:
    class Stored:
        """Hands out the published names, and keeps track."""

        def __init__(self) -> None:
            self.left = tensors_of(folder)

        def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = self.left.pop(name)
            assert tuple(tensor.shape) == shape
            return tensor.to(dtype)

    source = Stored()
    assert same(build_draft(source, read_draft_arch(folder), torch.float32), load(folder))
    assert not source.left
