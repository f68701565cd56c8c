"""From a block's hidden states to drafts: candidates, the walk along them, the law of each token, and its signals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.drafter.draft_arch import DraftArch
from services.drafter.draft_weights import SelectorWeights
from services.kernels.candidates import candidates
from services.kernels.noise_ref import gumbel, key_tensor
from services.kernels.selector_walk_ref import Walk, WalkLaws, edges, walk
from services.model.linear import Linear, padded

SIGNALS = ("top1", "entropy", "margin", "unary_top1", "unary_margin", "agree", "mass")
"""Columns of `Drafted.signals`; row k tells of the laws of position k before its token is drawn.

Of the realised law over the candidates, at the request's temperature (1 if greedy), before filters: probability of the
best, entropy in nats, log-probability of the best less that of the second. Of the law over the whole vocabulary by the
head alone, at temperature 1: probability of the best, its log-odds, whether both agree on the best (0 or 1), the
candidates' mass. Margin and log-odds end at MARGIN_LIMIT.
"""

MARGIN_LIMIT = 30.0
"""Nats; a second best that far behind is never seen."""


@dataclass(frozen=True)
class DraftLaw:
    """How one session draws its draft; temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off.

    noise: a `noise_key` for each of the `count` positions wanted; None if greedy.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    noise: list[tuple[int, int]] | None
    count: int


@dataclass(frozen=True)
class Drafted:
    """A draft of n tokens. q_ids int32 [n, k] and q float32 [n, k] are the candidates and their probabilities.

    Rows of q sum to 1, after the request's filters; None where the draft is greedy. signals float32 [n, len(SIGNALS)].
    """

    token_ids: list[int]
    q_ids: np.ndarray | None
    q: np.ndarray | None
    signals: np.ndarray


class PathSelector:
    """Chooses drafts along a block. Holds no session's state."""

    def __init__(
        self, weights: SelectorWeights | None, head: Linear, arch: DraftArch, vocabulary: Tensor | None = None
    ) -> None:
        """weights None: tokens do not depend on the one before. `head` has the rows of `vocabulary` alone, if given.

        vocabulary int64 [v]: ascending ids of the drafter's own vocabulary.
        """
        self._weights = weights
        self._head = head
        self._arch = arch
        self._vocabulary = vocabulary
        self._k = min(arch.selector_top_k, head.out_features)

    def propose(self, hidden: Tensor, anchors: list[int], laws: list[DraftLaw]) -> list[Drafted]:
        """hidden [R, n, h]: final-normed, slots first_slot and on; anchors and laws [R] -> R drafts."""
        sessions, positions, _ = hidden.shape
        flat = self._pad(hidden.flatten(0, 1))
        unary, ids, total = self._candidates(flat, sessions * positions)
        shape = (sessions, positions, self._k)
        unary, ids, total = unary.view(shape), ids.view(shape), total.view(sessions, positions)
        path = walk(unary, self._edges(flat, ids, anchors), _walk_laws(laws, ids))
        return _drafts(path, ids, _signals(path, unary, total), laws)

    def _pad(self, rows: Tensor) -> Tensor:
        missing = padded(len(rows)) - len(rows) if self._head.packed else 0
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def _candidates(self, flat: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._head(flat)[:rows]
        if self._arch.output_multiplier != 1.0:
            logits = logits.float() * self._arch.output_multiplier
        if self._arch.softcap:
            logits = torch.tanh(logits.float() / self._arch.softcap) * self._arch.softcap
        values, ids, total = candidates(logits, self._k)
        return values, ids if self._vocabulary is None else self._vocabulary[ids], total

    def _edges(self, flat: Tensor, ids: Tensor, anchors: list[int]) -> Tensor | None:
        """[R, n, k, k]: what the pair (candidate of the position before, candidate) adds to the score of the second."""
        if self._weights is None:
            return None
        sessions, positions, _ = ids.shape
        first = torch.tensor(anchors, device=ids.device).view(-1, 1, 1).expand(-1, 1, self._k)
        before = torch.cat([first, ids[:, :-1]], dim=1)
        hidden = self._weights.hidden_projection(flat)[: sessions * positions]
        hidden = hidden.view(sessions, positions, -1)
        return edges(hidden, F.embedding(before, self._weights.predecessor), F.embedding(ids, self._weights.successor))


def _walk_laws(laws: list[DraftLaw], ids: Tensor) -> WalkLaws:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=ids.device)[:, None]

    return WalkLaws(
        temperature=column([law.temperature for law in laws]),
        top_k=column([law.top_k for law in laws]),
        top_p=column([law.top_p for law in laws]),
        min_p=column([law.min_p for law in laws]),
        noise=_noise(laws, ids),
        filters=any(law.temperature > 0 and (law.top_k or law.top_p < 1 or law.min_p) for law in laws),
    )


def _noise(laws: list[DraftLaw], ids: Tensor) -> Tensor | None:
    """Gumbel noise [R, n, k] of the candidates; 0 where the draft is greedy, and none if all are."""
    sampled = [i for i, law in enumerate(laws) if law.noise is not None]
    if not sampled:
        return None
    positions = ids.shape[1]
    keys = [key for i in sampled for key in (*(laws[i].noise or ()), *[(0, 0)] * positions)[:positions]]
    drawn = gumbel(key_tensor(keys, ids.device), ids[sampled].flatten(0, 1).to(torch.int32))
    noise = torch.zeros(ids.shape, device=ids.device)
    noise[sampled] = drawn.view(len(sampled), positions, -1)
    return noise


def _signals(path: Walk, unary: Tensor, total: Tensor) -> Tensor:
    """Float32 [R, n, len(SIGNALS)], all finite. Row k depends on no token drawn at k or later."""
    law = torch.softmax(path.scaled, dim=-1)
    entropy = torch.special.entr(law).sum(dim=-1)
    behind = -path.scaled.scatter(-1, path.scaled.argmax(dim=-1, keepdim=True), -torch.inf).amax(dim=-1)
    # exp(total - best) is 1 + the others' mass over the best's; where float32 loses that mass, the candidates tell it.
    ahead = (unary[..., :1] - unary).neg().exp()[..., 1:].sum(dim=-1)
    others = torch.maximum(torch.expm1(total - unary[..., 0]), ahead)
    columns = [
        law.amax(dim=-1),
        entropy,
        behind.clamp(max=MARGIN_LIMIT),
        1 / (1 + others),
        others.log().neg().clamp(max=MARGIN_LIMIT),
        (path.scaled[..., 0] == 0).float(),
        (unary - total[..., None]).exp().sum(dim=-1).clamp(max=1),
    ]
    return torch.stack(columns, dim=-1)


def _drafts(path: Walk, ids: Tensor, signals: Tensor, laws: list[DraftLaw]) -> list[Drafted]:
    tokens = ids.gather(-1, path.rank[..., None]).squeeze(-1).tolist()
    told = signals.cpu().numpy()
    sampled = any(law.temperature > 0 for law in laws)
    q_ids = ids.to(torch.int32).cpu().numpy() if sampled else None
    q = torch.softmax(path.narrowed, dim=-1).cpu().numpy() if sampled else None
    drafts = []
    for i, law in enumerate(laws):
        n = law.count
        if q_ids is None or q is None or law.temperature == 0:
            drafts.append(Drafted(tokens[i][:n], None, None, told[i, :n]))
        else:
            drafts.append(Drafted(tokens[i][:n], q_ids[i, :n], q[i, :n], told[i, :n]))
    return drafts
