"""What a step sees: which examples and anchors, and what each position should draft, told anew token by token."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from training import batches
from training.examples import Example

VOCAB, KEPT, SIZE, GAMMA = 50, 4, 6, 3.0


def example(length: int, prompt: int, seed: int = 0) -> Example:
    generator = torch.Generator().manual_seed(seed)
    answer = length - prompt
    return Example(
        torch.randint(VOCAB, (length,), generator=generator),
        prompt,
        torch.randn(length, 8, generator=generator),
        torch.randint(VOCAB, (answer, KEPT), generator=generator),
        torch.rand(answer, KEPT, generator=generator),
    )


EXAMPLES = [example(23, 9, 1), example(40, 30, 2), example(11, 9, 3)]
PLACES = torch.where(torch.arange(VOCAB) % 3 > 0, torch.arange(VOCAB) * 2 // 3, -1)
"""A draft vocabulary of two ids in three, in their order."""


class Digests:
    """As much of a cache as `split` asks for."""

    def __init__(self, digests: list[str]) -> None:
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def prompt_digest(self, index: int) -> str:
        return self._digests[index]


def test_split() -> None:
    """By the conversation alone, wherever it stands, about one in twenty."""
    digests = [f"{i * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128):032x}" for i in range(2000)]

    def held(order: list[str]) -> tuple[set[str], int]:
        cache: Any = Digests(order)
        learn, out = batches.split(cache)
        assert sorted(learn + out) == list(range(len(order)))
        return {order[i] for i in out}, len(out)

    chosen, count = held(digests)
    assert held(digests[::-1]) == (chosen, count) and 60 < count < 140
    assert held(digests[:500])[0] == chosen & set(digests[:500])


def test_pick() -> None:
    """Every example once an epoch, each epoch in an order of its own, from (seed, step) alone."""
    steps = [batches.pick(10, step, 4, seed=7) for step in range(10)]
    flat = [place for step in steps for place in step]
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batches.pick(10, 6, 4, seed=7) == steps[6] and batches.pick(10, 6, 4, seed=8) != steps[6]


def test_draw() -> None:
    """Anchors are tokens of the answer that another one follows, different ones as long as there are."""
    counts: Counter[int] = Counter()
    for step in range(200):
        drawn = batches.draw(EXAMPLES, 7, step, seed=3)
        for one, places in zip(EXAMPLES, drawn, strict=True):
            possible = range(one.prompt, len(one.tokens) - 1)
            assert len(places) == 7 and places.tolist() == sorted(places.tolist())
            assert set(places.tolist()) <= set(possible)
            assert len(set(places.tolist())) == min(7, len(possible))
        counts.update(drawn[0].tolist())
    assert set(counts) == set(range(9, 22)) and max(counts.values()) < 1.6 * min(counts.values())
    again = batches.draw(EXAMPLES, 7, 199, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(again, drawn, strict=True))
    assert not torch.equal(batches.draw(EXAMPLES, 7, 199, seed=4)[0], drawn[0])


def test_assemble() -> None:
    anchors = [torch.tensor([9, 15, 21]), torch.tensor([30, 38, 38]), torch.tensor([9, 9, 9])]
    batch = batches.assemble(EXAMPLES, anchors, SIZE, PLACES, GAMMA, torch.bfloat16)
    blocks, labels = batch.blocks, batch.labels
    assert blocks.taps.shape == (3, 48, 8)  # the longest, on to a multiple of 16
    row = 0
    for number, (one, places) in enumerate(zip(EXAMPLES, anchors, strict=True)):
        assert torch.equal(blocks.taps[number, : len(one.tokens)], one.taps.bfloat16())
        assert not blocks.taps[number, len(one.tokens) :].any()
        for n, anchor in enumerate(places.tolist()):
            assert blocks.anchors[number, n] == anchor and blocks.tokens[number, n] == one.tokens[anchor]
            for k in range(1, SIZE):
                at = anchor + k
                inside = at < len(one.tokens)
                wanted = math.exp(-(k - 1) / GAMMA) if inside else 0.0
                assert float(labels.weight[row]) == pytest.approx(wanted)
                if inside:
                    assert labels.token[row] == PLACES[one.tokens[at]]
                    assert labels.before[row] == PLACES[one.tokens[at - 1]]
                    assert torch.equal(labels.ids[row], PLACES[one.ids[at - one.prompt]])
                    assert torch.equal(labels.p[row], one.p[at - one.prompt])
                row += 1
    assert row == len(labels.token) == len(labels.p) and labels.weight.dtype == torch.float32
    assert (labels.weight == 0).any() and (labels.token == -1).any()
