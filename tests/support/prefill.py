"""One prompt through a target in one step, without an engine."""

from __future__ import annotations

import random

import torch

from services.verifier.batch import Work, attention_for, plan
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import Target


def prefill(target: Target, tokens: list[int], page_size: int = 4) -> torch.Tensor:
    """Logits [n, V] of every position, over pages in a random order; by the native kernel where it is offered."""
    target.prepare(len(tokens) + 1)
    needed = -(-len(tokens) // page_size)
    pages = random.Random(0).sample(range(needed + 3), needed)
    kernel, layout = attention_for(target, needed + 3, page_size)
    caches = allocate_caches(target.arch, needed + 3, page_size, target.dtype)
    batch, _ = plan([Work(tokens, 0, len(tokens), pages)], layout)
    return target.forward(batch, caches, kernel)
