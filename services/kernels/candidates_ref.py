"""The best k ids of each row of logits and the log of the row's mass, in plain torch: the reference of `candidates`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 128  # ids whose maximum is taken first


def candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V], 0 < k <= V -> (values float32 [n, k] descending, ids int64 [n, k], logsumexp float32 [n]).

    Ties go to the smaller id; NaN counts as -inf. The row is not sorted: what is among the best k lies in the k chunks
    of the largest maxima, ties to the earlier chunk.
    """
    rows, size = logits.shape
    chunks = F.pad(logits, (0, -size % _CHUNK), value=-torch.inf).view(rows, -1, _CHUNK)
    best = _largest(chunks.amax(dim=-1), min(k, chunks.shape[1])).sort(dim=-1).values
    inside = chunks.gather(1, best[..., None].expand(-1, -1, _CHUNK)).reshape(rows, -1)
    ids = (best[..., None] * _CHUNK + torch.arange(_CHUNK, device=logits.device)).reshape(rows, -1)
    # Ties are told by place, so the chunks must come in the order of their ids.
    chosen = ids.gather(1, _largest(inside, k))
    return logits.gather(1, chosen).float(), chosen, torch.logsumexp(logits.float(), dim=-1)


def _largest(values: Tensor, k: int) -> Tensor:
    """Places [n, k] of the largest of `values` [n, m], best first; ties in order of place.

    torch.topk promises no order of ties, so what it compares is made unique: an integer that orders as the float
    does, above the place.
    """
    numbers = values.float() + 0.0  # + 0.0: -0.0 and 0.0 are equal
    bits = numbers.masked_fill_(numbers.isnan(), -torch.inf).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    places = torch.arange(values.shape[1], device=values.device)
    return torch.topk((ordered << 32) - places, k, dim=-1).indices
