"""The drafter in training: equal to what serves it and to the package dflash, blind to what a block must not see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from torch import Tensor
from transformers import Qwen3Config

from kadence.errors import CheckpointError
from services.drafter.backbone import Backbone
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.drafter.draft_kv import DraftKV
from services.drafter.draft_weights import load_draft
from services.drafter.path_selector import DraftLaw, PathSelector
from services.kernels import gradients
from services.model.linear import Linear
from services.model.projection import Projection
from services.model.rope_parameters import Llama3
from tests.support.mock_device import MockCuda
from tests.support.tiny_drafter import MASK, write_drafter
from training import checkpoint
from training.loss import Labels, head_loss
from training.model import Blocks, Convolution, DraftModel

VOCAB, HIDDEN, LENGTH = 330, 64, 48
ANCHORS = [[1, 4, 5, 30, 47], [2, 16, 17, 31, 46]]
SLOTS = 8


def build(folder: Path, kind: str = "dflash2", **config: Any) -> DraftModel:
    """A tiny checkpoint with every weight random, as a model that knows all ids."""
    write_drafter(folder, kind, seed=1, **config)
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    model = DraftModel(read_draft_arch(folder), embedding, VOCAB)
    assert checkpoint.load(model, folder, torch.arange(VOCAB)) == []
    return model


def blocks(dtype: torch.dtype = torch.float32) -> Blocks:
    """Ten blocks of two sequences of made-up feature rows."""
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(2, LENGTH, 2 * HIDDEN, generator=generator).to(dtype)
    return Blocks(taps, torch.tensor(ANCHORS), torch.randint(VOCAB, (2, 5), generator=generator))


def by_package(folder: Path, kind: str, model: DraftModel, b: Blocks) -> Tensor:
    """Hidden rows [B, N, m, h], block by block, each with a context of its own."""
    package = {"dflash2": DFlash2DraftModel, "dflash": DFlashDraftModel}[kind]
    reference = package.from_pretrained(folder, dtype=torch.float32).eval()
    config = Qwen3Config.from_pretrained(folder)
    found = []
    for taps, anchors, tokens in zip(b.taps, b.anchors.tolist(), b.tokens.tolist(), strict=True):
        for anchor, token in zip(anchors, tokens, strict=True):
            ids = torch.tensor([[token] + [MASK] * (SLOTS - 1)])
            with torch.inference_mode():
                hidden = reference(
                    target_hidden=taps[None, :anchor],
                    noise_embedding=model._embedding[ids],
                    position_ids=torch.arange(anchor + SLOTS)[None],
                    past_key_values=dflash.model._make_cache(config),
                    use_cache=True,
                )
            found.append(hidden[0])
    return torch.stack(found).view(2, 5, SLOTS, HIDDEN)


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_equals_the_package(kind: str, tmp_path: Path) -> None:
    config = {"conv_kernel_size": 3, "conv_group_size": 8} if kind == "dflash2" else {}
    model, b = build(tmp_path, kind, **config), blocks()
    with torch.no_grad():
        got = model(b)
    torch.testing.assert_close(got, by_package(tmp_path, kind, model, b), rtol=1e-5, atol=1e-5)


def served(folder: Path, model: DraftModel, b: Blocks, vocabulary: Tensor, head: Tensor) -> list[list[int]]:
    """Greedy drafts of every block by the modules that serve a checkpoint."""
    arch = read_draft_arch(folder)
    weights = load_draft(folder, arch, torch.float32)
    kv = DraftKV(arch, 1024, 10, SLOTS, torch.float32)
    backbone = Backbone(weights, model._embedding, kv)
    selector = PathSelector(weights.selector, Linear(head[vocabulary]), arch, vocabulary)
    project = Projection(weights.projection, torch.float32)
    anchors, tokens = b.anchors.flatten().tolist(), b.tokens.flatten().tolist()
    for key, anchor in enumerate(anchors):
        kv.open(key)
        backbone.extend([(key, project([b.taps[key // 5, :anchor]]), 0)])
    hidden = backbone.block(range(10), tokens, anchors, SLOTS)[:, 1:]
    laws = [DraftLaw(0.0, 0, 1.0, 0.0, None, SLOTS - 1)] * 10
    return [drafted.token_ids for drafted in selector.propose(hidden, tokens, laws)]


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_drafts_what_is_served(kind: str, tmp_path: Path) -> None:
    """Best path of the selector given its own choices, over a part of the ids; anchors may be any id."""
    build(tmp_path, kind)
    vocabulary = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))[:200].sort().values
    whole = DraftModel(read_draft_arch(tmp_path), torch.empty(VOCAB, HIDDEN), VOCAB)
    checkpoint.load(whole, tmp_path, torch.arange(VOCAB))
    model = DraftModel(whole.arch, torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2)), 200)
    checkpoint.load(model, tmp_path, vocabulary)
    checkpoint.save(model, tmp_path / "saved", vocabulary, vocabulary.tolist())
    checkpoint.load(model, tmp_path / "saved", vocabulary)  # both with weights that bfloat16 holds
    b, head = blocks(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))
    places = torch.full((VOCAB,), -1)
    places[vocabulary] = torch.arange(200)
    with torch.no_grad():
        rows = model(b)[:, :, 1:].reshape(-1, HIDDEN)
        none = torch.zeros(len(rows), 1)
        labels = Labels(none[:, 0].long(), none[:, 0].long(), none.long(), none, none[:, 0])
        _, scores = head_loss(rows, head[vocabulary], labels, 0.0, 16)
        ids, values = scores.ids.view(10, 7, 16), scores.values.view(10, 7, 16)
        before, drafted = places[b.tokens.flatten()], []
        assert kind == "dflash" or (before < 0).any()
        for k in range(7):
            final = values[:, k]
            if model.candidate_selector is not None:
                final = final + model.candidate_selector.edges(rows.view(10, 7, -1)[:, k], before, ids[:, k])
            before = ids[:, k].gather(1, final.argmax(-1, keepdim=True))[:, 0]
            drafted.append(vocabulary[before])
    got = torch.stack(drafted, dim=1).tolist()
    assert got == served(tmp_path / "saved", model, b, vocabulary, head)
    assert kind == "dflash" or got != vocabulary[ids[..., 0]].tolist(), "the selector changes nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_sees_its_context_and_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    model, b = build(tmp_path), blocks(dtype)

    def changed(other: Blocks) -> list[list[bool]]:
        """Of each block, whether any of its rows differs."""
        with torch.no_grad():
            return (model(other) != model(b)).flatten(2).any(-1).tolist()

    for row in (0, 4, 15, 16, 30, 46, 47):
        taps = b.taps.clone()
        taps[1, row] += 1
        wanted = [[False] * 5, [row < anchor for anchor in ANCHORS[1]]]
        assert changed(replace(b, taps=taps)) == wanted, row
    tokens = b.tokens.clone()
    tokens[0, 2] = (tokens[0, 2] + 1) % VOCAB
    assert changed(replace(b, tokens=tokens)) == [[False, False, True, False, False], [False] * 5]


def gradients_of(model: DraftModel, b: Blocks) -> dict[str, Tensor]:
    model.zero_grad()
    by = torch.randn(2, 5, SLOTS, HIDDEN, generator=torch.Generator().manual_seed(7))
    (model(b).float() * by).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.skipif(gradients._library() is None, reason="needs AVX512-BF16 and a C compiler")
def test_gradients_in_bfloat16(tmp_path: Path) -> None:
    """The C passes give every parameter the gradient that float32 does, to the dtype's rounding."""
    model = build(tmp_path)
    wanted, got = gradients_of(model, blocks()), gradients_of(model, blocks(torch.bfloat16))
    assert set(got) == set(wanted) and len(got) == len(list(model.parameters())) - 3  # the selector's
    for name, gradient in got.items():
        off = float((gradient - wanted[name]).norm() / wanted[name].norm())
        assert off < 0.05, f"{name} is off by {off}"


def test_begins_without_convolutions_and_selector(tmp_path: Path) -> None:
    """At first both change nothing, and both learn."""
    folder = write_drafter(tmp_path / "one", "dflash", seed=1)
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
    plain = DraftModel(read_draft_arch(folder), embedding, VOCAB)
    model = DraftModel(read_draft_arch(write_drafter(tmp_path / "two")), embedding, VOCAB)
    new = {name for name in model.state_dict() if "_conv." in name or "candidate_selector" in name}
    checkpoint.load(plain, folder, torch.arange(VOCAB))
    assert set(checkpoint.load(model, folder, torch.arange(VOCAB))) == new
    b = blocks()
    torch.testing.assert_close(model(b), plain(b), rtol=1e-6, atol=1e-6)
    learning = gradients_of(model, b)
    assert all(learning[name].abs().max() > 0 for name in new if "_conv." in name)
    selector, ids = model.candidate_selector, torch.arange(16).expand(4, 16)
    assert selector is not None and plain.candidate_selector is None
    edges = selector.edges(torch.ones(4, HIDDEN), torch.arange(4), ids)
    assert not edges.any()
    edges.sum().backward()
    assert selector.successor_codebook.grad is not None and selector.successor_codebook.grad[:16].abs().min() > 0


def test_edges(tmp_path: Path) -> None:
    """The sum over r of A[before] * (P h) * B[candidate]; an id without a row gives none."""
    selector = build(tmp_path).candidate_selector
    assert selector is not None
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    before, ids = torch.tensor([5, -1, 329]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    got = selector.edges(hidden, before, ids).detach()
    parts = selector.predecessor_codebook, selector.hidden_projection.weight, selector.successor_codebook
    a, p, c = (part.detach().double() for part in parts)
    for row in range(3):
        for place in range(2):
            wanted = float((a[before[row]] * (p @ hidden[row].double()) * c[ids[row, place]]).sum())
            assert float(got[row, place]) == pytest.approx(0 if row == 1 else wanted, rel=1e-4, abs=1e-5)


def test_share_inside_the_block(tmp_path: Path) -> None:
    """Without queries attention is even: m of anchor + m keys are the block's own."""
    model, own = build(tmp_path), list[float]()
    b = blocks()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_norm.weight.zero_()
        model(b, own)
    share = float((SLOTS / (b.anchors + SLOTS)).mean())
    assert own == pytest.approx([share, share], rel=1e-5)


def test_convolution_begins_as_the_identity(tmp_path: Path) -> None:
    conv = Convolution(read_draft_arch(write_drafter(tmp_path)))
    y = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(conv.around(y, lambda x: x * 2), y * 2)


def test_on_a_device(tmp_path: Path) -> None:
    """Nothing that the pass makes stays on the host."""
    model, b = build(tmp_path), blocks()
    with torch.no_grad():
        wanted = model(b)
        with MockCuda():
            for module in model.modules():  # Module.to would lose what says that a tensor is there
                for held in (module._parameters, module._buffers):
                    held.update({name: x.to("cuda") for name, x in held.items() if x is not None})
            out = model(Blocks(*(x.to("cuda") for x in (b.taps, b.anchors, b.tokens))))
            assert out.device.type == "cuda"
            got = out.cpu()
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"windows": (0, 9)}, "sliding windows"),
        ({"causal": (True, True)}, "causal blocks"),
        ({"first_slot": 0}, "slot 0"),
        ({"attention_bias": True}, "attention_bias"),
        ({"embedding_scale": 2.0}, "input_embedding_scale"),
        ({"softcap": 30.0}, "final_logit_softcapping"),
        ({"mask_token_id": None}, "mask embedding"),
    ],
)
def test_refuses_what_it_does_not_compute(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    arch: DraftArch = read_draft_arch(write_drafter(tmp_path))
    with pytest.raises(CheckpointError, match=named):
        DraftModel(replace(arch, **change), torch.zeros(VOCAB, HIDDEN), VOCAB)
    scaled = replace(arch, rope=replace(arch.rope, scaling=Llama3(8.0, 1.0, 4.0, 8192.0)))
    with pytest.raises(CheckpointError, match="scaled rotary embedding"):
        DraftModel(scaled, torch.zeros(VOCAB, HIDDEN), VOCAB)
