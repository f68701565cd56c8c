"""The walk along the candidates of a block, for all sessions at once (draft-model contracts, section 4.2).

Noise belongs to (session, position, token), whatever came before, so the scores of all pairs of neighbouring
candidates are one batched product, and a step of the walk only looks up the row of the token that was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WalkLaws:
    """How each of R sessions draws.

    temperature, top_p, min_p float32 [R, 1], top_k int64 [R, 1]: temperature 0 is greedy, top_k 0, top_p 1 and min_p 0
    are off. noise float32 [R, n, k]: Gumbel noise of each candidate, 0 for greedy sessions. filters: whether any
    session has any of the three filters on.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor | None
    filters: bool


@dataclass(frozen=True)
class Walk:
    """What was chosen: rank int64 [R, n] among the candidates; the law it is from, both float32 [R, n, k].

    scaled: final scores given the realised predecessor, over the temperature (1 if greedy), the best one 0.
    narrowed: the same with -inf at what the session's filters exclude; softmax of it is q.
    """

    rank: Tensor
    scaled: Tensor
    narrowed: Tensor


def edges(hidden: Tensor, predecessors: Tensor, successors: Tensor) -> Tensor:
    """hidden [R, n, r], predecessors [R, n, p, r], successors [R, n, k, r] -> float32 [R, n, p, k].

    Entry (i, j) is the sum over r of A[predecessor i] * hidden * B[successor j].
    """
    weighted = predecessors.float() * hidden.float()[:, :, None]
    sessions, positions, count, rank = weighted.shape
    flat = torch.bmm(weighted.view(-1, count, rank), successors.float().view(-1, successors.shape[2], rank).mT)
    return flat.view(sessions, positions, count, -1)


def walk(unary: Tensor, edges: Tensor | None, laws: WalkLaws) -> Walk:
    """unary float32 [R, n, k], best first; edges [R, n, k, k] from every candidate of the position before, or None.

    For the first position all rows of `edges` are those of the anchor. Greedy sessions take the best score, the others
    the best of score over temperature plus noise (Gumbel-max); ties go to the smaller rank.
    """
    sessions, positions, _ = unary.shape
    rows = torch.arange(sessions, device=unary.device)
    divisor = torch.where(laws.temperature > 0, laws.temperature, 1.0)
    rank = torch.zeros(sessions, dtype=torch.int64, device=unary.device)
    ranks, scaled, narrowed = [], [], []
    for k in range(positions):
        scores = unary[:, k] if edges is None else unary[:, k] + edges[rows, k, rank]
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / divisor
        kept = narrow(scores, laws) if laws.filters else scores
        rank = (kept if laws.noise is None else kept + laws.noise[:, k]).argmax(dim=-1)
        ranks.append(rank)
        scaled.append(scores)
        narrowed.append(kept)
    return Walk(torch.stack(ranks, 1), torch.stack(scaled, 1), torch.stack(narrowed, 1))


def narrow(scaled: Tensor, laws: WalkLaws) -> Tensor:
    """scaled [R, k], the best of each row 0 -> the same with -inf at what min-p, top-k, then top-p exclude.

    As `services.model.probs.keep` over the candidates alone: min-p drops what is less than min_p times as likely as the
    best, top-p keeps the smallest set whose mass among the rest reaches it; ties go to the smaller rank.
    """
    values, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    out = values < laws.min_p.log()
    places = torch.arange(values.shape[-1], device=values.device)
    out |= (places >= laws.top_k) & (laws.top_k > 0)
    mass = torch.softmax(values.masked_fill(out, -torch.inf), dim=-1)
    out |= (mass.cumsum(dim=-1) - mass >= laws.top_p) & (laws.top_p < 1)
    return scaled.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
