"""The drafter's pages: spans against a model of the cells in plain Python, exact capacity, windows, crops."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.drafter.draft_kv import PAGE, DraftKV, Span


def pool(capacity: int, sessions: int, block: int = 8, window: int = 0) -> DraftKV:
    arch: Any = SimpleNamespace(num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, window=window)
    return DraftKV(arch, capacity, sessions, block, torch.float32)


def cells(span: Span) -> list[tuple[int, int]]:
    """Page and offset of each of the span's rows."""
    return [(span.pages[at // PAGE], at % PAGE) for at in range(span.start, span.start + span.rows)]


@pytest.mark.parametrize("window", [0, 2, 17, 40])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_where_it_was_written(window: int, seed: int) -> None:
    """Cells as a dictionary: a block finds each row that it may see where `append` put it."""
    rng = random.Random(seed)
    kv = pool(400, 5, window=window)
    memory: dict[tuple[int, int], tuple[int, int]] = {}
    lengths: dict[int, int] = {}
    begins: dict[int, int] = {}
    for step in range(300):
        key = rng.randrange(5)
        if key not in lengths:
            kv.open(key)
            begins[key] = lengths[key] = rng.choice([0, 0, 33]) if window else 0
        elif rng.random() < 0.1:
            kv.close(key)
            del lengths[key]
        rows = rng.choice([1, 2, 5, 40])
        if key in lengths and sum(kv.cost(n) for n in lengths.values()) + rows <= 400:
            span = kv.append(key, lengths[key], rows)
            lengths[key] += rows
            assert span.position + span.rows == lengths[key] == kv.length(key)
            for row, cell in enumerate(cells(span)):
                memory[cell] = (key, span.position + row)
        kv.check()
        drafting = [key for key in lengths if lengths[key] > begins[key]]
        for session, span in zip(drafting, kv.reserve(drafting, slots := rng.choice([1, 8])), strict=True):
            assert span.position == lengths[session] and span.rows == slots
            oldest = max(begins[session], lengths[session] - window + 1 if window else 0)
            for position in range(oldest, lengths[session]):
                at = span.start - (lengths[session] - position)
                assert memory[span.pages[at // PAGE], at % PAGE] == (session, position)
            for cell in cells(span):
                memory[cell] = (session, -1 - step)
        kv.crop(drafting)
        kv.check()
    for key in list(lengths):
        kv.close(key)
    kv.check()
    assert kv.tokens == 0


@pytest.mark.parametrize("block", [1, 8, 16, 17])
@pytest.mark.parametrize("window", [0, 30])
def test_capacity_is_exact(window: int, block: int) -> None:
    """Sessions of any sizes that sum up to the capacity fit with all their blocks; one row more does not."""
    for seed in range(20):
        rng = random.Random(seed)
        sessions, capacity = rng.randint(1, 6), rng.randint(20, 200)
        kv, left = pool(capacity, sessions, block, window), capacity
        for key in range(sessions):
            kv.open(key)
            rows = left if key == sessions - 1 and not window else rng.randint(0, left)
            rows = min(rows, 29) if window else rows
            base = rng.choice([0, 7]) if window else 0
            for first in range(rows):
                kv.append(key, base + first, 1)
            for extra in range(rng.choice([0, 20]) if window and rows == 29 else 0):
                kv.append(key, base + rows + extra, 1)  # the window slides: no more capacity is taken
            left -= rows
        assert kv.tokens == capacity - left
        kv.reserve(range(sessions), block)
        kv.crop(range(sessions))
        kv.check()
        if not window:
            with pytest.raises(AssertionError, match="more rows than"):
                kv.append(sessions - 1, kv.length(sessions - 1), left + 1)


def test_a_long_run_keeps_its_end() -> None:
    kv = pool(1000, 1, window=10)
    kv.open(1)
    span = kv.append(1, 0, 500)
    assert (span.rows, span.position, span.start, kv.length(1), kv.tokens) == (9, 491, 0, 500, 9)
    assert len(span.pages) == 1
    kv.check()


def test_misuse() -> None:
    kv = pool(100, 1)
    kv.open(1)
    kv.append(1, 0, 5)
    for base in (4, 6):
        with pytest.raises(AssertionError, match="a session that has 5"):
            kv.append(1, base, 1)
    with pytest.raises(AssertionError, match="too many"):
        kv.open(2)


def test_cost() -> None:
    assert [pool(10, 1).cost(n) for n in (0, 5, 500)] == [0, 5, 500]
    assert [pool(10, 1, window=6).cost(n) for n in (0, 5, 500)] == [0, 5, 5]
