"""Our drafter against the PyPI package dflash on the same checkpoints: the same drafts, the same q, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.drafter.backbone import Backbone
from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_kv import DraftKV
from services.drafter.draft_weights import load_draft
from services.drafter.path_selector import Drafted, DraftLaw, PathSelector
from services.drafter.target_tables import load_target_tables
from services.kernels.noise_ref import noise_key
from services.model.linear import Linear
from services.model.projection import Projection
from tests.support import dflash_reference, tiny_drafter
from tests.support.dflash_reference import Reference
from tests.support.tiny_llama import TinyLlama

ROUNDS = 20
LENGTHS = (5, 33)
"""Of the texts that are drafted for in one batch."""

CASES: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "dflash2, block 16": {"block_size": 16},
    "dflash2, causal": {"is_causal": True},
    "dflash2, sliding": {"layer_types": "sliding_attention"},
    "dflash2, sliding, causal, block 16": {"layer_types": "sliding_attention", "is_causal": True, "block_size": 16},
    "dflash2, window within the block": {"layer_types": "sliding_attention", "sliding_window": 6, "block_size": 16},
    # Without a flag sliding layers are causal, full ones are not.
    "dflash2, mixed": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "is_causal": None,
        "target_layer_ids": [0, 1, 2],
    },
    "dflash2, mixed, sliding first": {
        "layer_types": ["sliding_attention", "full_attention"],
        "output_multiplier": 0.6,
        "input_embedding_scale": 2.0,
    },
    "dflash2, softcap": {"final_logit_softcapping": 1.5, "output_multiplier": 1.4, "attention_bias": True},
    "dflash2, groups of 8": {"conv_group_size": 8, "selector_rank": 12},
    "dflash": {"kind": "dflash"},
    "dflash, block 16": {"kind": "dflash", "block_size": 16, "final_logit_softcapping": 2.0},
    "dflash, sliding": {"kind": "dflash", "layer_types": "sliding_attention", "is_causal": None},
}


class Ours:
    """Sessions 0, 1, ... of our drafter without its service; feature rows come from the reference's taps."""

    def __init__(self, folder: Path, target: Path, sessions: int) -> None:
        arch = read_draft_arch(folder)
        weights, tables = load_draft(folder, arch, torch.float32), load_target_tables(target, torch.float32)
        self.arch = arch
        self._projection = Projection(weights.projection, torch.float32)
        self.kv = DraftKV(arch, 4096, sessions, arch.block_size, torch.float32)
        self._backbone = Backbone(weights, tables.embedding, self.kv)
        self._selector = PathSelector(weights.selector, Linear(tables.head), arch, None)
        for key in range(sessions):
            self.kv.open(key)

    @torch.inference_mode()
    def propose(
        self, references: list[Reference], texts: list[list[int]], slots: int, temperature: float
    ) -> list[Drafted]:
        """One draft for every text, all in one pass."""
        appends = []
        for key, (text, reference) in enumerate(zip(texts, references, strict=True)):
            held = self.kv.length(key)
            taps = reference.taps(text[:-1])[0, held:].split(self.arch.target_hidden_size, dim=-1)
            appends.append((key, self._projection(list(taps)), held))
        self._backbone.extend(appends)
        positions = [len(text) - 1 for text in texts]
        anchors = [text[-1] for text in texts]
        hidden = self._backbone.block(list(range(len(texts))), anchors, positions, slots)[:, 1:]
        count = slots - 1
        laws = [
            DraftLaw(
                temperature,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                noise=[noise_key(key, s + k) for k in range(1, slots)] if temperature else None,
                count=count,
            )
            for key, s in enumerate(positions)
        ]
        return self._selector.propose(hidden, anchors, laws)


def checkpoint(folder: Path, config: dict[str, Any]) -> tuple[Path, TinyLlama]:
    """A checkpoint by the package's own modules, and a target for it."""
    target = TinyLlama(folder / "target", seed=1, num_hidden_layers=tiny_drafter.TARGET_LAYERS)
    sizes = tiny_drafter.config_of(**config)
    if sizes["is_causal"] is None:
        del sizes["is_causal"]
    dflash_reference.write(folder / "drafter", sizes)
    return folder / "drafter", target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_same_drafts_round_by_round(name: str, temperature: float, tmp_path: Path) -> None:
    """Each round commits another share of its draft, none to all, and a token that was not drafted."""
    folder, target = checkpoint(tmp_path, CASES[name])
    theirs = [Reference(folder, target.model) for _ in LENGTHS]
    ours = Ours(folder, target.folder, len(LENGTHS))
    drawn = random.Random(0)
    texts = [[drawn.randrange(tiny_drafter.MASK) for _ in range(length)] for length in LENGTHS]
    slots = ours.arch.block_size
    seen = set()
    for number in range(ROUNDS):
        drafts = ours.propose(theirs, texts, slots, temperature)
        for key, (text, reference, draft) in enumerate(zip(texts, theirs, drafts, strict=True)):
            assert len(draft.token_ids) == slots - 1
            proposed = reference.propose(text, slots, temperature, draft.token_ids)
            assert draft.token_ids == proposed.token_ids, f"session {key}, round {number}"
            assert (draft.q is None) == (proposed.q is None)
            if proposed.q is not None:
                q = torch.zeros_like(proposed.q)
                q.scatter_(-1, torch.from_numpy(draft.q_ids).long(), torch.from_numpy(draft.q))
                assert float((q - proposed.q).abs().max()) < 1e-5, f"session {key}, round {number}"
            accepted = (number + 3 * key) % slots
            text += [*draft.token_ids[:accepted], drawn.randrange(tiny_drafter.MASK)]
            seen.update(draft.token_ids)
        ours.kv.check()
    assert len(seen) > 8, "drafts do not vary"


@pytest.mark.parametrize("slots", [2, 5])
def test_fewer_slots_than_the_block(slots: int, tmp_path: Path) -> None:
    """A shorter block is another one: its convolutions end there, and its slots see fewer others."""
    folder, target = checkpoint(tmp_path, {})
    reference, ours = Reference(folder, target.model), Ours(folder, target.folder, 1)
    text = list(range(3, 40))
    (draft,) = ours.propose([reference], [text], slots, 0.0)
    assert draft.token_ids == reference.propose(text, slots).token_ids


def test_published_names(tmp_path: Path) -> None:
    """Codebooks without `.weight`, as published checkpoints have them, load in both."""
    target = TinyLlama(tmp_path / "target", seed=1, num_hidden_layers=tiny_drafter.TARGET_LAYERS)
    folder = tiny_drafter.write_drafter(tmp_path / "drafter")
    reference, ours = Reference(folder, target.model), Ours(folder, target.folder, 1)
    text = list(range(3, 40))
    (draft,) = ours.propose([reference], [text], ours.arch.block_size, 0.0)
    assert draft.token_ids == reference.propose(text, ours.arch.block_size).token_ids
