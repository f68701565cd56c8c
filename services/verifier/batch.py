"""Plans one ragged step: which rows run, where their K/V goes, and how attention is grouped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.kernels.attention_plan import Layout, cache_cells, plan_attention
from services.kernels.ragged_attention import RaggedAttention
from services.verifier.target import ForwardBatch, Target


@dataclass(frozen=True)
class Work:
    """One request's part of a step: `tokens` run from position `start` on; the last `samples` rows give logits."""

    tokens: list[int]
    start: int
    samples: int
    pages: list[int]

    @property
    def rows(self) -> int:
        """How many rows run."""
        return len(self.tokens)


def attention_for(target: Target, num_pages: int, page_size: int) -> tuple[RaggedAttention | None, Layout]:
    """The fastest attention there is for the target on this machine (None: the reference), and the layout it wants."""
    arch = target.arch
    kernel = None
    if target.device.type == "cpu":
        kernel = RaggedAttention.find(target.dtype, num_pages, page_size, arch.num_kv_heads, arch.head_dim)
    return kernel, Layout(num_pages, page_size, arch.num_kv_heads, target.dtype, native=kernel is not None)


def plan(works: list[Work], layout: Layout) -> tuple[ForwardBatch, list[int]]:
    """The batch that runs `works`, and the works' order in it (sample rows come in that order)."""
    attention = plan_attention(works, layout)
    ordered = [works[i] for i in attention.order]
    tokens = np.concatenate([np.asarray(work.tokens, dtype=np.int64) for work in ordered])
    positions = np.concatenate([np.arange(work.start, work.start + work.rows) for work in ordered])
    samples, row = [], 0
    for work in ordered:
        row += work.rows
        samples.append(np.arange(row - work.samples, row))
    batch = ForwardBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        slots=cache_cells(ordered, layout),
        groups=attention.groups,
        blocks=attention.blocks,
        sample_rows=torch.from_numpy(np.concatenate(samples)),
    )
    return batch, attention.order
