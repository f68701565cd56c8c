"""What a drafter would have drafted behind every token of known answers, and what that would have brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kadence.errors import CheckpointError
from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_vocabulary import read_draft_vocabulary
from services.model.arch import read_arch
from services.model.weights import Checkpoint
from training import batches, checkpoint
from training.acceptance import interval
from training.examples import Example
from training.held_out import Hits, hits
from training.model import DraftModel

PATHS = ("walk", "unary", "oracle")
"""Of the selector, each choice made behind its own one before; the head's best of each position; the best path inside
the candidates."""


@dataclass(frozen=True)
class Offline:
    """Of one task. Lists by position hold m - 1 numbers, the first drafted token's first."""

    anchors: int
    """Blocks that were drafted: one behind every token of every answer that another one follows."""
    recall: dict[str, list[float]]
    """Share of right tokens by position, whatever came before them, for each of PATHS: "oracle" is recall@k of the
    candidates."""
    length: dict[str, float]
    """Tokens per step, all answers together, if each step began where the one before ended."""
    intervals: dict[str, tuple[float, float]]
    """Where these lie with 90 % confidence, answers being a sample."""
    own: list[float]
    """Share of attention that stays inside the block, by layer."""


class Drafter:
    """A trained drafter, read to draft over whole answers at once."""

    def __init__(self, folder: Path, target: Path, vocabulary: int, dtype: torch.dtype) -> None:
        """vocabulary: how many ids of the folder's ranking it drafts. dtype: in which it computes.

        Raises CheckpointError or ConfigError.
        """
        arch, model = read_draft_arch(folder), read_arch(target)
        ids = read_draft_vocabulary(folder / "draft_vocabulary.json", vocabulary, model.vocab_size)
        shape = (model.vocab_size, model.hidden_size)
        with Checkpoint(target) as tensors:
            embedding = tensors.take("model.embed_tokens.weight", shape, dtype)
            head = embedding if model.tied_head else tensors.take("lm_head.weight", shape, dtype)
        self.taps, self._dtype = arch.taps, dtype
        self._head = head[ids]
        self._places = torch.full((model.vocab_size,), -1)
        self._places[ids] = torch.arange(len(ids))
        self._model = DraftModel(arch, embedding, len(ids))
        if missing := checkpoint.load(self._model, folder, ids):
            raise CheckpointError(f"{folder}: tensor {missing[0]} is missing")

    def over(self, examples: Sequence[Example]) -> Offline:
        """Drafts behind every token of all answers. examples: at least one, each with an answer of two tokens."""
        parts, shares = [], []
        for example in examples:
            own: list[float] = []
            parts.append(self._over(example, own))
            shares.append(own)
        alive = torch.cat([part.alive for part in parts])
        counts = alive.sum(dim=0).clamp(min=1)
        recall, length, intervals = {}, {}, {}
        for path in PATHS:
            right = torch.cat([_hit(part, path) for part in parts]) & alive
            recall[path] = (right.sum(dim=0) / counts).tolist()
            pairs = [walked(part.lengths(_hit(part, path)).tolist()) for part in parts]
            length[path] = sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs)
            intervals[path] = interval(pairs)
        own = [sum(column) / len(column) for column in zip(*shares, strict=True)]
        return Offline(len(alive), recall, length, intervals, own)

    def _over(self, example: Example, own: list[float]) -> Hits:
        anchors = torch.arange(example.prompt, len(example.tokens) - 1)
        batch = batches.assemble([example], [anchors], self._model.arch.block_size, self._places, 1.0, self._dtype)
        return hits(self._model, self._head, batch, own)


def walked(lengths: Sequence[int]) -> tuple[int, int]:
    """Tokens and steps of an answer whose block at place i, of len(lengths), would commit lengths[i] tokens.

    The first step begins at place 0; what the last would commit beyond the answer's end does not count.
    """
    place = steps = 0
    while place < len(lengths):
        place += lengths[place]
        steps += 1
    return len(lengths), steps


def _hit(part: Hits, path: str) -> Tensor:
    return {"walk": part.walk, "unary": part.unary, "oracle": part.inside}[path]


def without_selector(folder: Path, out: Path) -> Path:
    """A copy of the checkpoint in `out` whose selector adds nothing: its successor codebook is zero. Returns `out`."""
    name = "candidate_selector.successor_codebook"
    tensors = load_file(folder / "model.safetensors")
    if name not in tensors:
        raise CheckpointError(f"{folder}: it has no selector to be left out")
    tensors[name] = torch.zeros_like(tensors[name])
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "draft_vocabulary.json"):
        (out / file).write_bytes((folder / file).read_bytes())
    return out
