"""Plans one ragged step: which rows run, where their K/V goes, and how attention is grouped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.kernels.ragged_attention import BLOCK, AttentionBlocks, RaggedAttention
from services.kernels.ragged_attention_ref import AttentionGroup
from services.verifier.target import ForwardBatch, Target

# Contexts are padded to a multiple of this many pages: matrix kernels are compiled per shape, few are wanted.
_PAGE_MULTIPLE = 4
# What one more attention group costs, in query rows x keys; from timing the default model.
_GROUP_COST = 4096


@dataclass(frozen=True)
class Work:
    """One request's part of a step: `tokens` run from position `start` on; the last `samples` rows give logits."""

    tokens: list[int]
    start: int
    samples: int
    pages: list[int]


@dataclass(frozen=True)
class Layout:
    """Cache geometry needed to turn (page, offset) into rows."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    dtype: torch.dtype
    native: bool = False
    """Whether attention is planned for the native kernel."""


def attention_for(target: Target, num_pages: int, page_size: int) -> tuple[RaggedAttention | None, Layout]:
    """The fastest attention there is for the target on this machine (None: the reference), and the layout it wants."""
    arch = target.arch
    kernel = RaggedAttention.find(target.dtype, num_pages, page_size, arch.num_kv_heads, arch.head_dim)
    return kernel, Layout(num_pages, page_size, arch.num_kv_heads, target.dtype, native=kernel is not None)


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


def plan(works: list[Work], layout: Layout) -> tuple[ForwardBatch, list[int]]:
    """The batch that runs `works`, and the works' order in it (sample rows come in that order)."""
    sizes = [(len(w.tokens), w.start + len(w.tokens)) for w in works]
    grouped = [list(range(len(works)))] if layout.native else group_work(sizes)
    order = [i for group in grouped for i in group]
    tokens = np.concatenate([np.asarray(works[i].tokens, dtype=np.int64) for i in order])
    positions = np.concatenate([np.arange(works[i].start, sizes[i][1]) for i in order])
    slots = np.concatenate([_slots(works[i], layout) for i in order])
    groups, samples, row = [], [], 0
    for members in grouped:
        group = [works[i] for i in members]
        if not layout.native:
            groups.append(_group(group, row, layout))
        for work in group:
            row += len(work.tokens)
            samples.append(np.arange(row - work.samples, row))
    batch = ForwardBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(_head_rows(slots, layout.num_pages * layout.page_size, layout).T.reshape(-1).copy()),
        groups=groups,
        blocks=_blocks(works) if layout.native else None,
        sample_rows=torch.from_numpy(np.concatenate(samples)),
    )
    return batch, order


def _slots(work: Work, layout: Layout) -> np.ndarray:
    """Cache slot (page * page_size + offset) of each of the work's rows."""
    position = np.arange(work.start, work.start + len(work.tokens))
    pages = np.asarray(work.pages, dtype=np.int64)
    return pages[position // layout.page_size] * layout.page_size + position % layout.page_size


def _head_rows(index: np.ndarray, stride: int, layout: Layout) -> np.ndarray:
    """index [n] within one head's block -> [2 * Hkv, n] over the blocks of all heads, K then V."""
    heads = np.arange(2 * layout.num_kv_heads, dtype=np.int64)[:, None]
    return heads * stride + index[None, :]


def _blocks(works: list[Work]) -> AttentionBlocks:
    """Each work's rows in blocks of at most BLOCK query tokens."""
    cuts, row = [], 0
    for index, work in enumerate(works):
        for offset in range(0, len(work.tokens), BLOCK):
            cuts.append((row + offset, min(BLOCK, len(work.tokens) - offset), work.start + offset, index))
        row += len(work.tokens)
    first, tokens, start, owner = torch.tensor(cuts, dtype=torch.int64).T.contiguous()
    table = np.zeros((len(works), max(len(work.pages) for work in works)), dtype=np.int64)
    for row, work in enumerate(works):
        table[row, : len(work.pages)] = work.pages
    return AttentionBlocks(first, tokens, start, owner, torch.from_numpy(table))


def _group(works: list[Work], first_row: int, layout: Layout) -> AttentionGroup:
    q_lens = [len(w.tokens) for w in works]
    queries = max(q_lens)
    page = layout.page_size
    longest = max(-(-(w.start + len(w.tokens)) // page) for w in works)
    num_pages = -(-longest // _PAGE_MULTIPLE) * _PAGE_MULTIPLE
    table = np.zeros((len(works), num_pages), dtype=np.int64)  # padding reads page 0, masked
    for r, work in enumerate(works):
        used = work.pages[:num_pages]
        table[r, : len(used)] = used
    starts = np.asarray([w.start for w in works])
    # Query j of request r sits at starts[r] + j and sees keys up to itself; padded queries see what the last one sees.
    last_seen = starts[:, None] + np.minimum(np.arange(queries)[None, :], np.asarray(q_lens)[:, None] - 1)
    visible = np.arange(num_pages * page)[None, None, :] <= last_seen[:, :, None]
    mask = torch.zeros(visible.shape, dtype=layout.dtype)
    mask.masked_fill_(torch.from_numpy(~visible), float("-inf"))
    pad = unpad = None
    if min(q_lens) != queries:
        offsets = np.concatenate([[0], np.cumsum(q_lens)[:-1]])
        slot = np.minimum(np.arange(queries)[None, :], np.asarray(q_lens)[:, None] - 1)
        pad = torch.from_numpy((offsets[:, None] + slot).reshape(-1))
        unpad = torch.from_numpy(np.concatenate([r * queries + np.arange(q_len) for r, q_len in enumerate(q_lens)]))
    return AttentionGroup(
        rows=(first_row, first_row + sum(q_lens)),
        requests=len(works),
        queries=queries,
        keys=num_pages * page,
        pages=torch.from_numpy(_head_rows(table.reshape(-1), layout.num_pages, layout).reshape(-1)),
        mask=mask[None, :, :, None, :],
        pad=pad,
        unpad=unpad,
    )
