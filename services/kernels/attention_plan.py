"""Plans the attention of one ragged step: cells of the cache, padded groups (reference), blocks (native kernel)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.kernels.ragged_attention import BLOCK, AttentionBlocks
from services.kernels.ragged_attention_ref import AttentionGroup

# Contexts are padded to a multiple of this many pages: matrix kernels are compiled per shape, few are wanted.
_PAGE_MULTIPLE = 4
# What one more attention group costs, in query rows x keys; from timing the default model.
_GROUP_COST = 4096


class Segment(Protocol):
    """One request's part of a step: `rows` query rows from position `start` on; `pages` hold keys 0 .. start + rows."""

    @property
    def rows(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def pages(self) -> list[int]: ...


@dataclass(frozen=True)
class Layout:
    """Cache geometry needed to turn (page, offset) into rows."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    dtype: torch.dtype
    native: bool = False
    """Whether attention is planned for the native kernel."""


@dataclass(frozen=True)
class AttentionPlan:
    """`order`: how the segments' rows must lie in the batch. `blocks` for the native kernel, or `groups`."""

    order: list[int]
    groups: list[AttentionGroup]
    blocks: AttentionBlocks | None


def plan_attention(segments: Sequence[Segment], layout: Layout, causal: bool = True, window: int = 0) -> AttentionPlan:
    """The plan of one step. `causal`: a row sees keys up to itself, else all of its request's, later rows' too.

    `window` > 0: of those only keys less than `window` positions away, before or after. The order does not depend on
    either.
    """
    if layout.native:
        return AttentionPlan(list(range(len(segments))), [], _blocks(segments, causal, window))
    grouped = group_work([(s.rows, s.start + s.rows) for s in segments])
    groups, row = [], 0
    for members in grouped:
        group = _group([segments[i] for i in members], row, layout, causal, window)
        groups.append(group)
        row = group.rows[1]
    return AttentionPlan([i for members in grouped for i in members], groups, None)


def cache_cells(segments: Sequence[Segment], layout: Layout) -> Tensor:
    """Rows of a cache viewed as [-1, d] that take the segments' K and V: [n * 2 * Hkv], K heads, then V heads."""
    slots = np.concatenate([_slots(segment, layout) for segment in segments])
    return torch.from_numpy(_head_rows(slots, layout.num_pages * layout.page_size, layout).T.reshape(-1).copy())


def group_work(sizes: list[tuple[int, int]]) -> list[list[int]]:
    """Splits requests, given as (query rows, context) pairs, into padded groups of little waste.

    Greedy over requests sorted by size: a request joins the current group while the padding that causes costs less
    than one more group. Returns lists of indices; each request is in exactly one.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True)
    groups: list[list[int]] = []
    q_max = k_max = 0
    for i in order:
        q, k = sizes[i]
        if groups:
            members = len(groups[-1])
            new_q, new_k = max(q_max, q), max(k_max, k)
            waste = (new_q * new_k - q * k) + members * (new_q * new_k - q_max * k_max)
            if waste <= _GROUP_COST:
                groups[-1].append(i)
                q_max, k_max = new_q, new_k
                continue
        groups.append([i])
        q_max, k_max = q, k
    return groups


def _slots(segment: Segment, layout: Layout) -> np.ndarray:
    """Cache slot (page * page_size + offset) of each of the segment's rows."""
    position = np.arange(segment.start, segment.start + segment.rows)
    pages = np.asarray(segment.pages, dtype=np.int64)
    return pages[position // layout.page_size] * layout.page_size + position % layout.page_size


def _head_rows(index: np.ndarray, stride: int, layout: Layout) -> np.ndarray:
    """index [n] within one head's block -> [2 * Hkv, n] over the blocks of all heads, K then V."""
    heads = np.arange(2 * layout.num_kv_heads, dtype=np.int64)[:, None]
    return heads * stride + index[None, :]


def _blocks(segments: Sequence[Segment], causal: bool, window: int) -> AttentionBlocks:
    """Each segment's rows in blocks of at most BLOCK query tokens."""
    cuts, row = [], 0
    for index, segment in enumerate(segments):
        end = segment.start + segment.rows
        for offset in range(0, segment.rows, BLOCK):
            tokens, start = min(BLOCK, segment.rows - offset), segment.start + offset
            cuts.append((row + offset, tokens, start, start + tokens if causal else end, index))
        row += segment.rows
    first, tokens, start, end, owner = torch.tensor(cuts, dtype=torch.int64).T.contiguous()
    table = np.zeros((len(segments), max(len(segment.pages) for segment in segments)), dtype=np.int64)
    for row, segment in enumerate(segments):
        table[row, : len(segment.pages)] = segment.pages
    return AttentionBlocks(first, tokens, start, end, owner, torch.from_numpy(table), causal, window)


def _group(segments: Sequence[Segment], first_row: int, layout: Layout, causal: bool, window: int) -> AttentionGroup:
    q_lens = np.asarray([s.rows for s in segments])
    queries = int(q_lens.max())
    page = layout.page_size
    longest = max(-(-(s.start + s.rows) // page) for s in segments)
    num_pages = -(-longest // _PAGE_MULTIPLE) * _PAGE_MULTIPLE
    table = np.zeros((len(segments), num_pages), dtype=np.int64)  # padding reads page 0, masked
    for r, segment in enumerate(segments):
        used = segment.pages[:num_pages]
        table[r, : len(used)] = used
    slot = np.minimum(np.arange(queries)[None, :], q_lens[:, None] - 1)  # padded queries repeat the last one
    visible = _visible(np.asarray([s.start for s in segments]), q_lens, slot, num_pages * page, causal, window)
    mask = torch.zeros(visible.shape, dtype=layout.dtype)
    mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
    pad = unpad = None
    if q_lens.min() != queries:
        offsets = np.concatenate([[0], np.cumsum(q_lens)[:-1]])
        pad = torch.from_numpy((offsets[:, None] + slot).reshape(-1))
        unpad = torch.from_numpy(np.concatenate([r * queries + np.arange(q_len) for r, q_len in enumerate(q_lens)]))
    return AttentionGroup(
        rows=(first_row, first_row + int(q_lens.sum())),
        requests=len(segments),
        queries=queries,
        keys=num_pages * page,
        pages=torch.from_numpy(_head_rows(table.reshape(-1), layout.num_pages, layout).reshape(-1)),
        mask=mask[None, :, :, None, :],
        pad=pad,
        unpad=unpad,
    )


def _visible(
    starts: np.ndarray, q_lens: np.ndarray, slot: np.ndarray, keys: int, causal: bool, window: int
) -> np.ndarray:
    """[R, Q, L]: whether the query of request r that is its row slot[r, q] sees key l."""
    position = starts[:, None] + slot
    last = position if causal else np.broadcast_to((starts + q_lens - 1)[:, None], slot.shape)
    if window:
        last = np.minimum(last, position + window - 1)
    key = np.arange(keys)[None, None, :]
    visible = key <= last[:, :, None]
    return visible & (key > (position - window)[:, :, None]) if window else visible
