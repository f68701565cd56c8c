"""The one path from logits to a law, to the token that rule `match` draws from it, and to draws from other laws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.kernels.noise_ref import GUMBEL_SPAN, gumbel, key_tensor, noise_key
from services.model.edits import Edits, apply

_CHUNK = 128  # tokens whose maximum is taken first
_LOWEST = torch.finfo(torch.float32).min  # below it is only -inf, which is never kept


@dataclass(frozen=True)
class RowLaw:
    """How one row's token is drawn: the request's law, and the address of its noise (seed, absolute position).

    `edits` change the logits first; then come temperature, min-p, top-k and top-p, in this order.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int
    min_p: float = 0.0
    edits: Edits | None = field(default=None, compare=False)

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p excludes some tokens."""
        return self.top_k > 0 or self.top_p < 1.0


def scale(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits [..., V] -> float32 logits at `temperature` > 0, the best one 0, so that no temperature overflows."""
    wide = logits.float()
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperature


def keep(scaled: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Ids (int64, likeliest first, ties smaller id first) that survive min-p, top-k and top-p of one row `scaled` [V].

    min_p 0, top_k 0 and top_p 1 keep all but -inf. min-p drops what is less than min_p times as likely as the best
    (Nguyen 2024); top-p keeps the smallest set whose mass, after the others, reaches it (Holtzman 2020).
    """
    if min_p > 0:
        scaled = scaled.masked_fill(scaled < scaled.amax() + math.log(min_p), -math.inf)
    total = float(torch.logsumexp(scaled, dim=-1))
    top_k = top_k if top_k < scaled.numel() else 0
    ids = (scaled >= _floor(scaled, total, top_k, top_p)).nonzero().squeeze(1)
    return _cut(ids, scaled[ids], total, top_k, top_p)[0]


def _floor(scaled: Tensor, total: float, top_k: int, top_p: float) -> float:
    """A scaled logit below which nothing survives; `total` is the log of the row's mass, top_k 0 or below V."""
    if top_k > 0:
        # Everything not below the k-th value: ties are then cut by id, as everywhere.
        return max(float(torch.topk(scaled, top_k, sorted=False).values.min()), _LOWEST)
    if top_p < 1.0:
        # What lies below (1 - top_p) / V each is less than 1 - top_p together: the nucleus is among the rest. A
        # hundredth is left to rounding.
        return total + math.log(0.99 * (1.0 - top_p) / scaled.numel())
    return _LOWEST


def _cut(ids: Tensor, values: Tensor, total: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The survivors among candidates `ids` of scaled logits `values`, likeliest first, and their values."""
    values, order = torch.sort(values, descending=True, stable=True)
    ids = ids[order]
    if top_k > 0:
        ids, values = ids[:top_k], values[:top_k]
        total = float(torch.logsumexp(values, dim=-1))
    if top_p < 1.0:
        mass = torch.exp(values - total)
        before = torch.cumsum(mass, dim=-1) - mass
        count = max(1, int((before < top_p).sum()))
        ids, values = ids[:count], values[:count]
    return ids, values


def draw(logits: Tensor, laws: list[RowLaw]) -> list[int]:
    """The target's own token for each row: logits [s, V] -> s ids.

    Temperature 0 takes the best (ties: the smaller id); else Gumbel-max with the row's addressable noise, which draws
    from softmax(logits / temperature) after filters (Maddison et al. 2014).
    """
    plain = any(law.temperature == 0 and law.edits is None for law in laws)
    chosen = best(logits).tolist() if plain else [0] * len(laws)
    edited = [i for i, law in enumerate(laws) if law.temperature == 0 and law.edits is not None]
    if edited:
        tokens = best(_edit(logits[edited], [laws[i] for i in edited])).tolist()
        for i, token in zip(edited, tokens, strict=True):
            chosen[i] = token
    sampled = [i for i, law in enumerate(laws) if law.temperature > 0]
    if sampled:
        sampled_laws = [laws[i] for i in sampled]
        for i, token in zip(sampled, _draw_sampled(_edit(logits[sampled], sampled_laws), sampled_laws), strict=True):
            chosen[i] = token
    return chosen


def best(logits: Tensor) -> Tensor:
    """argmax of each row [s, V] -> [s]; ties go to the smaller id.

    Chunk maxima first: torch's argmax is far slower than its amax, most of all in bfloat16 (8 times at 128 rows).
    """
    rows, size = logits.shape
    if size % _CHUNK:
        return logits.argmax(dim=-1)
    chunks = logits.view(rows, size // _CHUNK, _CHUNK)
    chunk = chunks.amax(dim=-1).argmax(dim=-1)
    inside = chunks.gather(1, chunk[:, None, None].expand(-1, 1, _CHUNK)).squeeze(1).argmax(dim=-1)
    return chunk * _CHUNK + inside


def _edit(logits: Tensor, laws: list[RowLaw]) -> Tensor:
    """The rows as their edits leave them; `logits` is a copy, and may be overwritten."""
    if all(law.edits is None for law in laws):
        return logits
    logits = logits.float()
    for row, law in zip(logits, laws, strict=True):
        if law.edits is not None:
            apply(row, law.edits)
    return logits


def log_laws(logits: Tensor, laws: list[RowLaw]) -> Tensor:
    """The laws themselves: logits [s, V] -> float32 [s, V], log p after edits, temperature and filters, -inf outside.

    Temperatures are above 0.
    """
    if any(law.edits is not None for law in laws):
        logits = _edit(logits.clone(), laws)
    table = torch.log_softmax(_scaled(logits, laws), dim=-1)
    for row, law in zip(table, laws, strict=True):
        if law.filters:
            k = law.top_k if law.top_k < row.numel() else 0
            ids = (row >= _floor(row, 0.0, k, law.top_p)).nonzero().squeeze(1)
            ids, values = _cut(ids, row[ids], 0.0, k, law.top_p)
            row.fill_(-math.inf)
            row[ids] = torch.log_softmax(values, dim=-1)
    return table


def draw_from(weights: Tensor, keys: list[tuple[int, int]]) -> list[int]:
    """A token for each row of log-weights [s, V], which need not sum to 1 but exclude not everything: Gumbel-max."""
    near = weights >= weights.amax(dim=-1, keepdim=True) - GUMBEL_SPAN  # who is further behind cannot win
    chosen = []
    for row, key, ids in zip(weights, keys, near.nonzero()[:, 1].split(near.sum(dim=-1).tolist()), strict=True):
        noise = gumbel(key_tensor([key], ids.device), ids.to(torch.int32)[None])[0]
        chosen.append(int(ids[(row[ids] + noise).argmax()]))
    return chosen


def _scaled(logits: Tensor, laws: list[RowLaw]) -> Tensor:
    """`scale` for each row's temperature, and min-p."""
    scaled = scale(logits, torch.tensor([[law.temperature] for law in laws], device=logits.device))
    for row, law in zip(scaled, laws, strict=True):
        if law.min_p > 0:  # the best is at 0
            row.masked_fill_(row < math.log(law.min_p), -math.inf)
    return scaled


def _draw_sampled(logits: Tensor, laws: list[RowLaw]) -> list[int]:
    """Gumbel-max over each row's candidates. What needs the whole vocabulary is done for all rows at once."""
    scaled = _scaled(logits, laws)
    totals = torch.logsumexp(scaled, dim=-1).tolist()
    ks = [law.top_k if law.top_k < logits.shape[-1] else 0 for law in laws]
    floors = [
        # Without filters: noise spans no more than GUMBEL_SPAN, and who is further behind the best, 0, cannot win.
        _floor(row, total, k, law.top_p) if law.filters else -GUMBEL_SPAN
        for row, total, k, law in zip(scaled, totals, ks, laws, strict=True)
    ]
    near = scaled >= torch.tensor(floors, device=scaled.device)[:, None]
    candidates = near.nonzero()[:, 1].split(near.sum(dim=-1).tolist())
    chosen = []
    for row, ids, total, k, law in zip(scaled, candidates, totals, ks, laws, strict=True):
        values = row[ids]
        if law.filters:
            ids, values = _cut(ids, values, total, k, law.top_p)
        noise = gumbel(key_tensor([noise_key(law.seed, law.position)], ids.device), ids.to(torch.int32)[None])[0]
        chosen.append(int(ids[(values + noise).argmax()]))
    return chosen
