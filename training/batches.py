"""What one training step sees: some examples, and blocks at random anchors of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.examples import Cache, Example
from training.loss import Labels
from training.model import Blocks

HELD_OUT = 20
"""One prompt in so many is never trained on, with all its answers, chosen by its digest."""

_MULTIPLE = 16  # what the kernels want of a number of keys


@dataclass(frozen=True)
class Batch:
    """Blocks, and what they should draft: labels of B * N * (m - 1) positions, block by block."""

    blocks: Blocks
    labels: Labels


def split(cache: Cache) -> tuple[list[int], list[int]]:
    """Indices of the examples to train on, and of those held out."""
    parts: tuple[list[int], list[int]] = ([], [])
    for index in range(len(cache)):
        parts[int(cache.prompt_digest(index), 16) % HELD_OUT == 0].append(index)
    return parts


def pick(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Places of the `batch` examples of step `step` among `count`: a new order every time all have been seen."""
    found = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, at = divmod(place, count)
        found.append(int(torch.randperm(count, generator=_generator(seed, 0, epoch))[at]))
    return found


def draw(examples: Sequence[Example], anchors: int, step: int, seed: int) -> list[Tensor]:
    """For each example `anchors` different places where a block may begin, ascending; fewer answers repeat some.

    An anchor is a token of the answer that another one follows.
    """
    found = []
    for number, example in enumerate(examples):
        places = len(example.tokens) - 1 - example.prompt
        order = torch.randperm(places, generator=_generator(seed, 1, step, number))
        order = order.repeat(-(-anchors // places))[:anchors]
        found.append(example.prompt + order.sort().values)
    return found


def assemble(
    examples: Sequence[Example],
    anchors: Sequence[Tensor],
    size: int,
    vocabulary: Tensor,
    gamma: float,
    dtype: torch.dtype,
) -> Batch:
    """Blocks of `size` slots at `anchors`, the same number in each example.

    vocabulary int64 [V]: place of each id in the draft vocabulary, or -1. Position k weighs exp(-(k - 1) / gamma), 0
    where the answer has ended. dtype: that of the taps, in which the drafter computes.
    """
    longest, width = max(len(e.tokens) for e in examples), examples[0].taps.shape[1]
    longest = -(-longest // _MULTIPLE) * _MULTIPLE
    taps = torch.zeros(len(examples), longest, width, dtype=dtype)
    parts = []
    steps = torch.arange(1, size)
    for number, (example, places) in enumerate(zip(examples, anchors, strict=True)):
        taps[number, : len(example.tokens)] = example.taps
        at = places[:, None] + steps  # [N, size - 1]
        inside = at < len(example.tokens)
        at = at.clamp(max=len(example.tokens) - 1)
        weight = torch.exp(-(steps - 1) / gamma) * inside
        answer = at - example.prompt
        parts.append((example.tokens[at], example.tokens[at - 1], example.ids[answer], example.p[answer], weight))
    token, before, ids, p, weight = (torch.cat([part[i] for part in parts]).flatten(0, 1) for i in range(5))
    where = torch.stack(list(anchors))
    blocks = Blocks(taps, where, torch.stack([e.tokens[a] for e, a in zip(examples, where, strict=True)]))
    return Batch(blocks, Labels(vocabulary[token], vocabulary[before], vocabulary[ids], p, weight))


def _generator(*numbers: int) -> torch.Generator:
    """A stream of its own for every list of numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 61)
    return torch.Generator().manual_seed(seed)
