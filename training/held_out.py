"""How well a drafter drafts, block by block, on examples whose answers are known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.batches import Batch
from training.loss import head_loss
from training.model import DraftModel


@dataclass(frozen=True)
class Hits:
    """Which drafted positions are right, bool [R, m - 1]: of R blocks, position by position.

    walk: of the selector, given its own choice before; without a selector the same as unary. unary: the head's best.
    inside: whether the candidates hold the token at all. alive: whether the answer reaches so far.
    """

    walk: Tensor
    unary: Tensor
    inside: Tensor
    alive: Tensor

    def lengths(self, hit: Tensor) -> Tensor:
        """Tokens that each block would commit, bonus included: int64 [R]."""
        return 1 + (hit & self.alive).int().cumprod(dim=-1).sum(dim=-1)


@torch.no_grad()
def hits(model: DraftModel, head: Tensor, batch: Batch, own: list[float] | None = None) -> Hits:
    """Drafts greedily from every block of the batch. head [v, h]; own: see `DraftModel.forward`."""
    labels = batch.labels
    rows = model(batch.blocks, own)[:, :, 1:].flatten(0, 1)  # [R, m - 1, h]
    blocks, positions, width = rows.shape
    _, scores = head_loss(rows.reshape(-1, width), head, labels, 0.0, model.arch.selector_top_k)
    ids, values = (x.view(blocks, positions, -1) for x in (scores.ids, scores.values))
    token, alive = labels.token.view(blocks, positions), labels.weight.view(blocks, positions) > 0
    unary, inside = ids[..., 0] == token, (ids == token[..., None]).any(dim=-1)
    if model.candidate_selector is None:
        return Hits(unary, unary, inside, alive)
    before, walk = labels.before.view(blocks, positions)[:, 0], []
    for k in range(positions):
        final = values[:, k] + model.candidate_selector.edges(rows[:, k], before, ids[:, k])
        before = ids[:, k].gather(1, final.argmax(dim=-1, keepdim=True))[:, 0]
        walk.append(before == token[:, k])
    return Hits(torch.stack(walk, dim=1), unary, inside, alive)
