"""The one path from logits to a law and to the token that rule `match` draws from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.kernels.noise_ref import GUMBEL_SPAN, gumbel, key_tensor, noise_key


@dataclass(frozen=True)
class RowLaw:
    """How one row's token is drawn: the request's law, and the address of its noise (seed, absolute position)."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded."""
        return self.top_k > 0 or self.top_p < 1.0


def scale(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits [..., V] -> float32 logits at `temperature` > 0, the best one 0, so that no temperature overflows."""
    wide = logits.float()
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperature


def keep(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ids (int64, likeliest first, ties smaller id first) that survive top-k, then top-p, of one row `scaled` [V].

    top_k 0 and top_p 1 keep all. top-p keeps the smallest set whose mass, after top-k, reaches it (Holtzman 2020).
    """
    size = scaled.numel()
    cut = 0 < top_k < size
    best = torch.topk(scaled, top_k, sorted=False).values if cut else scaled
    total = torch.logsumexp(best, dim=-1)
    floors = []
    if cut:
        # Everything not below the k-th value: ties are then cut by id, as everywhere.
        floors.append(float(best.min()))
    if top_p < 1.0:
        # What lies below (1 - top_p) / V each is less than 1 - top_p together: the nucleus is among the rest. A
        # hundredth is left to rounding.
        floors.append(float(total) + math.log(0.99 * (1.0 - top_p) / size))
    ids = (scaled >= max(floors)).nonzero().squeeze(1) if floors else torch.arange(size)
    ids = ids[torch.sort(scaled[ids], descending=True, stable=True).indices]
    if cut:
        ids = ids[:top_k]
    if top_p < 1.0:
        mass = torch.exp(scaled[ids] - total)
        before = torch.cumsum(mass, dim=-1) - mass
        ids = ids[: max(1, int((before < top_p).sum()))]
    return ids


def draw(logits: Tensor, laws: list[RowLaw]) -> list[int]:
    """The target's own token for each row: logits [s, V] -> s ids.

    Temperature 0 takes the best (ties: the smaller id); else Gumbel-max with the row's addressable noise, which draws
    from softmax(logits / temperature) after filters (Maddison et al. 2014).
    """
    chosen = logits.argmax(dim=-1).tolist() if any(law.temperature == 0 for law in laws) else [0] * len(laws)
    sampled = [i for i, law in enumerate(laws) if law.temperature > 0]
    if sampled:
        temperatures = torch.tensor([[laws[i].temperature] for i in sampled])
        for i, scaled in zip(sampled, scale(logits[sampled], temperatures), strict=True):
            chosen[i] = _draw_row(scaled, laws[i])
    return chosen


def _draw_row(scaled: Tensor, law: RowLaw) -> int:
    """Gumbel-max over the row's candidates; `scaled` [V] has its best at 0."""
    ids = keep(scaled, law.top_k, law.top_p) if law.filters else _near(scaled)
    noise = gumbel(key_tensor([noise_key(law.seed, law.position)]), ids.to(torch.int32)[None])[0]
    return int(ids[(scaled[ids] + noise).argmax()])


def _near(scaled: Tensor) -> Tensor:
    """Ids that can win at all: noise spans no more than GUMBEL_SPAN, so who is further behind the best cannot."""
    return (scaled > -GUMBEL_SPAN).nonzero().squeeze(1)
