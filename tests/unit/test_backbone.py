"""The drafter's backbone against the package dflash, and against itself: chunks, crops, windows, batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from torch import Tensor
from transformers import Qwen3Config

from services.drafter.backbone import Backbone
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.drafter.draft_kv import DraftKV
from services.drafter.draft_weights import load_draft
from services.model.projection import Projection
from tests.support.tiny_drafter import MASK, config_of, random_tensors, write_drafter

VOCAB, HIDDEN, TAPS = 330, 64, 2
SLIDING = ["sliding_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full causal": {"is_causal": True},
    "sliding": {"layer_types": "sliding_attention", "sliding_window": 6},
    "sliding causal": {"layer_types": "sliding_attention", "sliding_window": 6, "is_causal": True},
    "mixed": {"layer_types": SLIDING, "sliding_window": 9},
    "wide": {"block_size": 16, "conv_kernel_size": 3, "conv_group_size": 8},
    "scaled": {"input_embedding_scale": 3.0, "attention_bias": True},
}


class Drafter:
    """A tiny checkpoint, our backbone of it, and feature rows of a made-up text of 120 tokens."""

    def __init__(self, folder: Path, kind: str = "dflash2", dtype: torch.dtype = torch.float32, **config: Any) -> None:
        write_drafter(folder, kind, seed=1, **config)
        self.folder, self.dtype = folder, dtype
        self.arch: DraftArch = read_draft_arch(folder)
        self.weights = load_draft(folder, self.arch, dtype)
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.taps = torch.randn(120, TAPS * HIDDEN, generator=generator)
        self.rows = Projection(self.weights.projection, dtype)([self.taps.to(dtype)])
        self.begin()

    def begin(self, sessions: int = 4) -> None:
        """Forgets every session and opens new ones, from key 0 on."""
        self.kv = DraftKV(self.arch, 2048, sessions, self.arch.block_size, self.dtype)
        self.backbone = Backbone(self.weights, self.embedding.to(self.dtype), self.kv)
        for key in range(sessions):
            self.kv.open(key)

    def extend(self, key: int, first: int, end: int) -> None:
        self.backbone.extend([(key, self.rows[first:end], first)])

    def block(self, key: int, slots: int | None = None, anchor: int = 7) -> Tensor:
        slots = slots or self.arch.block_size
        hidden = self.backbone.block([key], [anchor], [self.kv.length(key)], slots)[0]
        self.kv.check()
        return hidden


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def reference(drafter: Drafter, kind: str, lengths: list[int], slots: int, anchor: int = 7) -> list[Tensor]:
    """Hidden rows of one round at each of `lengths`, by the package."""
    config = Qwen3Config.from_pretrained(drafter.folder)
    model = {"dflash2": DFlash2DraftModel, "dflash": DFlashDraftModel}[kind].from_pretrained(
        drafter.folder, dtype=torch.float32
    )
    cache, held, found = dflash.model._make_cache(config), 0, []
    ids = torch.tensor([[anchor] + [MASK] * (slots - 1)])
    scale = dflash.model._draft_value(config, "input_embedding_scale", 1.0)
    with torch.inference_mode():
        for length in lengths:
            hidden = model.eval()(
                target_hidden=drafter.taps[None, held:length],
                noise_embedding=drafter.embedding[ids] * scale,
                position_ids=torch.arange(held, length + slots)[None],
                past_key_values=cache,
                use_cache=True,
            )
            dflash.model._crop_to(cache, length)
            found.append(hidden[0])
            held = length
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["dflash2", "dflash"])
def test_equals_the_package(family: str, kind: str, tmp_path: Path) -> None:
    config = {k: v for k, v in KINDS[kind].items() if family == "dflash2" or not k.startswith("conv_")}
    drafter = Drafter(tmp_path, family, **config)
    lengths = [1, 4, 5, 30, 41, 100]
    for slots in (drafter.arch.block_size, 3):
        drafter.begin()
        held = 0
        for length, wanted in zip(lengths, reference(drafter, family, lengths, slots), strict=True):
            drafter.extend(0, held, length)
            close(drafter.block(0, slots), wanted)
            held = length


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
def test_chunks_and_company_do_not_matter(kind: str, tmp_path: Path) -> None:
    """Rows in chunks of any sizes, beside other sessions, with blocks in between, against all at once and alone."""
    drafter, rng = Drafter(tmp_path, **KINDS[kind]), random.Random(3)
    lengths = [5, 17, 64, 110]
    alone = []
    for length in lengths:
        drafter.begin()
        drafter.extend(0, 0, length)
        alone.append(drafter.block(0))
    drafter.begin()
    held = [0] * len(lengths)
    while held != lengths:
        ends = [min(n + rng.choice([0, 1, 2, 7, 20]), length) for n, length in zip(held, lengths, strict=True)]
        drafter.backbone.extend(
            [(key, drafter.rows[a:b], a) for key, (a, b) in enumerate(zip(held, ends, strict=True))]
        )
        drafter.kv.check()
        held = ends
        some = [key for key in range(len(lengths)) if held[key]]
        drafter.backbone.block(some, [9] * len(some), [held[key] for key in some], rng.choice([2, 8]))
    order = [2, 0, 3, 1]
    together = drafter.backbone.block(order, [7] * 4, [lengths[key] for key in order], drafter.arch.block_size)
    for key, hidden in zip(order, together, strict=True):
        close(hidden, alone[key])


def test_rejected_rounds_leave_nothing(tmp_path: Path) -> None:
    """Blocks with other anchors and sizes, then few new rows: as a session that never drafted."""
    drafter = Drafter(tmp_path)
    drafter.extend(0, 0, 20)
    for anchor, end in ((1, 21), (2, 24), (3, 25)):
        drafter.block(0, anchor=anchor)
        drafter.extend(0, drafter.kv.length(0), end)
    drafter.extend(1, 0, 25)
    close(drafter.block(0), drafter.block(1))
    assert not torch.allclose(drafter.block(0), drafter.block(0, anchor=8), atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_before_the_window_do_not_matter(causal: bool, tmp_path: Path) -> None:
    drafter = Drafter(tmp_path, layer_types="sliding_attention", sliding_window=12, is_causal=causal)
    drafter.extend(0, 0, 90)
    drafter.extend(1, 90 - 11, 90)  # the last window - 1 rows alone
    drafter.extend(2, 90 - 10, 90)
    for key in range(0, 90, 13):
        drafter.extend(3, key, min(key + 13, 90))
    whole, enough, short, chunks = (drafter.block(key) for key in range(4))
    close(enough, whole)
    close(chunks, whole)
    assert not torch.allclose(short[0], whole[0], atol=1e-4), "the window's oldest row counts"
    assert drafter.kv.tokens == 3 * 11 + 10


def test_causal_blocks_differ(tmp_path: Path) -> None:
    """A slot of a causal block does not depend on how many follow; of one that sees both ways, it does."""
    for causal in (True, False):
        drafter = Drafter(tmp_path, layer_types="sliding_attention", is_causal=causal)
        drafter.extend(0, 0, 40)
        same = torch.allclose(drafter.block(0, 8)[:4], drafter.block(0, 4), atol=1e-5)
        assert same == causal


def test_identity_convolution_is_dflash(tmp_path: Path) -> None:
    base = torch.zeros(2, 2, HIDDEN)
    base[:, 0] = 1
    ours = random_tensors(config_of("dflash2"), seed=1)
    shared = {name: tensor for name, tensor in ours.items() if "_conv" not in name and "selector" not in name}
    plain = {
        name: base if "base" in name else torch.zeros_like(tensor) for name, tensor in ours.items() if "_conv" in name
    }
    one = Drafter(tmp_path / "2", tensors={name: tensor.clone() for name, tensor in plain.items()})
    other = Drafter(tmp_path / "1", "dflash", tensors=shared)
    for drafter in (one, other):
        drafter.extend(0, 0, 30)
    close(one.block(0), other.block(0))


def test_own_mask_embedding_replaces_the_row(tmp_path: Path) -> None:
    own = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    drafter = Drafter(tmp_path / "own", tensors={"mask_embedding": own[None]})
    other = Drafter(tmp_path / "table")
    other.embedding[MASK] = own
    other.begin()
    for each in (drafter, other):
        each.extend(0, 0, 20)
    close(drafter.block(0), other.block(0))
    assert not torch.allclose(drafter.block(0), drafter.block(0, anchor=MASK), atol=1e-3), "the anchor's row stays"


@pytest.mark.parametrize("sliding", [False, True])
def test_bfloat16_is_close(sliding: bool, tmp_path: Path) -> None:
    """With the native kernels where they are offered: head size, groups and windows that they take."""
    config = {"head_dim": 32, "layer_types": "sliding_attention" if sliding else "full_attention", "sliding_window": 20}
    exact, rough = Drafter(tmp_path, **config), Drafter(tmp_path, dtype=torch.bfloat16, **config)
    for drafter in (exact, rough):
        drafter.backbone.extend([(key, drafter.rows[: 30 * key + 5], 0) for key in range(4)])
    keys, lengths = list(range(4)), [30 * key + 5 for key in range(4)]
    for slots in (8, 7):
        wanted, got = (each.backbone.block(keys, [7, 8, 9, 10], lengths, slots) for each in (exact, rough))
        assert got.dtype == torch.bfloat16
        assert (got.float() - wanted).square().mean().sqrt() < 0.05 * wanted.std()


def test_long_texts(tmp_path: Path) -> None:
    """Beyond the first rotary table; an anchor may be the last position there is, none may lie beyond."""
    drafter = Drafter(tmp_path, "dflash", layer_types="sliding_attention", max_position_embeddings=2000)
    drafter.backbone.extend([(0, drafter.rows, 1999 - 120)])
    drafter.block(0)
    drafter.backbone.extend([(0, drafter.rows[:1], 1999)])
    with pytest.raises(AssertionError, match="beyond position 2000"):
        drafter.block(0)
    with pytest.raises(AssertionError, match="do not reach"):
        drafter.backbone.block([0], [1], [5], 8)
