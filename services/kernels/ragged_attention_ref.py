"""Attention of ragged query blocks over paged K/V in plain torch: the reference, and the path taken on a CPU.

Requests are batched into groups padded to their longest query block and context. Within a group the query heads that
share a KV head are folded into rows, so that one batched matrix product serves all heads (decode shapes otherwise run
up to 16x slower through scaled_dot_product_attention in bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionGroup:
    """Index tensors of one padded group; the same for every layer of a step.

    rows: where the group's rows lie in the step's batch, [start, stop).
    requests, queries, keys: padded sizes R, Q, L.
    pages [2 * Hkv * R * L / page]: rows of the cache viewed as [2 * Hkv * num_pages, page * head_dim].
    mask [1, R, Q, 1, L]: 0 where a key may be seen, -inf elsewhere.
    pad [R * Q] or None: row (relative to start) each padded query slot reads; None if nothing is padded.
    unpad [stop - start] or None: padded slot each real row is read back from.
    """

    rows: tuple[int, int]
    requests: int
    queries: int
    keys: int
    pages: Tensor
    mask: Tensor
    pad: Tensor | None
    unpad: Tensor | None


def ragged_attention(
    q: Tensor, cache: Tensor, groups: list[AttentionGroup], num_kv_heads: int, head_dim: int
) -> Tensor:
    """q [n, Hq, d], cache [2 * Hkv * num_pages, page * d] (K heads, then V heads) -> [n, Hq * d].

    The step's own K/V are already in the cache; causality and windows are in the groups' masks.
    """
    outs = [_attend(q, cache, group, num_kv_heads, head_dim) for group in groups]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(q: Tensor, cache: Tensor, g: AttentionGroup, kv_heads: int, d: int) -> Tensor:
    rows = q[g.rows[0] : g.rows[1]]
    if g.pad is not None:
        rows = rows.index_select(0, g.pad)
    fold = rows.shape[1] // kv_heads  # query heads per KV head
    # [R, Q, Hkv, fold, d] -> [Hkv * R, Q * fold, d]
    folded = rows.view(g.requests, g.queries, kv_heads, fold, d).permute(2, 0, 1, 3, 4)
    folded = folded.reshape(kv_heads * g.requests, g.queries * fold, d)
    kv = cache.index_select(0, g.pages).view(2, kv_heads * g.requests, g.keys, d)
    scores = torch.baddbmm(folded.new_empty(()), folded, kv[0].transpose(1, 2), beta=0, alpha=d**-0.5)
    scores.view(kv_heads, g.requests, g.queries, fold, g.keys).add_(g.mask)
    out = torch.bmm(torch.softmax(scores, dim=-1), kv[1])  # [Hkv * R, Q * fold, d]
    out = out.view(kv_heads, g.requests, g.queries, fold, d).permute(1, 2, 0, 3, 4)
    out = out.reshape(g.requests * g.queries, kv_heads * fold * d)
    return out if g.unpad is None else out.index_select(0, g.unpad)
