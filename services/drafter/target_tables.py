"""What a drafter uses of its target's checkpoint: the tables of embeddings and logits, and who the target is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kadence.errors import ConfigError
from services.drafter.draft_weights import DraftWeights
from services.model.arch import read_arch
from services.model.weights import Checkpoint


@dataclass(frozen=True, eq=False)
class TargetTables:
    """Embedding and head of a target, and what of it a drafter must match."""

    embedding: Tensor
    """[V, h]"""
    head: Tensor
    """[V, h]; the embedding itself where they are tied"""
    fingerprint: str
    """As the verifier computes it."""
    num_layers: int
    hidden_size: int
    vocab_size: int

    def check(self, draft: DraftWeights) -> None:
        """Raises ConfigError naming both values if `draft` is for another target."""
        a = draft.arch
        pairs = [
            ("vocab_size", a.vocab_size, self.vocab_size),
            ("num_target_layers", a.num_target_layers or self.num_layers, self.num_layers),
            ("target_hidden_size", a.target_hidden_size, self.hidden_size),
        ]
        if draft.embedding is None or draft.head is None:
            pairs.append(("hidden_size", a.hidden_size, self.hidden_size))
        for key, ours, its in pairs:
            if ours != its:
                raise ConfigError(f"drafter's {key} is {ours}, the model's is {its}: it was made for another model")
        if a.taps[-1] > self.num_layers - 2:
            raise ConfigError(
                f"drafter reads layer outputs {list(a.taps)}, the model has {self.num_layers} layers: "
                f"at most {self.num_layers - 2} can be read"
            )


def load_target_tables(folder: Path, dtype: torch.dtype) -> TargetTables:
    """Reads the two tables as `dtype`. Raises CheckpointError naming file and tensor."""
    arch = read_arch(folder)
    shape = (arch.vocab_size, arch.hidden_size)
    with Checkpoint(folder) as checkpoint:
        embedding = checkpoint.take("model.embed_tokens.weight", shape, dtype)
        head = embedding if arch.tied_head else checkpoint.take("lm_head.weight", shape, dtype)
        return TargetTables(
            embedding=embedding,
            head=head,
            fingerprint=checkpoint.fingerprint(ignore=["lm_head.weight"] if arch.tied_head else []),
            num_layers=arch.num_layers,
            hidden_size=arch.hidden_size,
            vocab_size=arch.vocab_size,
        )
