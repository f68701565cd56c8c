"""What training minimises: of the head over the draft vocabulary, and of the selector among its candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from services.kernels import gradients
from services.kernels.candidates import candidates


@dataclass(frozen=True)
class Labels:
    """Of n drafted positions. Ids count within the draft vocabulary, -1 is none of them.

    token, before int64 [n]: the answer's token, and the one before it. ids int64 [n, t], p float32 [n, t]: the
    target's likeliest tokens and their probabilities. weight float32 [n], 0 beyond the answer's end.
    """

    token: Tensor
    before: Tensor
    ids: Tensor
    p: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Scores:
    """The head's best k of each position, best first: ids and values [n, k]; log of its whole mass [n]."""

    ids: Tensor
    values: Tensor
    total: Tensor


class _Head(torch.autograd.Function):
    """Cross entropy of a frozen head against sparse targets, without the weight's gradient.

    The gradient by the logits is made on the way forward, where they are at hand, and kept in the head's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, mass: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids int64 [n, t], mass float32 [n, t] -> loss [], values [n, k], candidates [n, k], total [n]."""
        logits = F.linear(hidden, head)
        values, chosen, total = candidates(logits, k)
        loss = (mass.sum(-1) * total).sum() - (mass * logits.gather(1, ids)).sum()
        ctx.save_for_backward(gradients.cross_entropy_slope(logits, total, ids, mass), head, chosen)
        ctx.mark_non_differentiable(chosen, total)
        return loss, values, chosen, total

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, by_values: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        slope, head, chosen = ctx.saved_tensors
        # by_loss comes last, where there is least to multiply; a loss that counts nothing has no use for this function
        rows = torch.arange(len(slope), device=slope.device)[:, None]
        slope[rows, chosen] += (by_values / by_loss).to(slope.dtype)  # scatter_ would copy all of it twice
        return (slope @ head) * by_loss.to(slope.dtype), None, None, None, None


def head_loss(hidden: Tensor, head: Tensor, labels: Labels, soft: float, k: int) -> tuple[Tensor, Scores]:
    """hidden [n, h], head [v, h] -> loss [] and the best k.

    Cross entropy, summed by the labels' weights, against soft * target distribution + (1 - soft) * answer's token; what
    is outside the draft vocabulary, or beyond the likeliest that were kept, counts in neither.
    """
    token, others = labels.token[:, None], labels.ids
    mass = torch.cat([(1 - soft) * (token >= 0), soft * labels.p * (others >= 0)], dim=1) * labels.weight[:, None]
    loss, values, chosen, total = _Head.apply(hidden, head, torch.cat([token, others], 1).clamp(min=0), mass, k)
    return loss, Scores(chosen, values, total)


def selector_loss(final: Tensor, candidate_ids: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """final float32 [n, k]: scores with edges -> cross entropy [n] among the candidates, and the token's place [n].

    Where the token is none of them the loss is 0 and the place -1.
    """
    hit = candidate_ids == token[:, None]
    place = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
    loss = F.cross_entropy(final, place.clamp(min=0), reduction="none") * (place >= 0)
    return loss, place
