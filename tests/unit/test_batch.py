"""Plans of ragged steps against a model of the cache in plain Python: every row, cell, group and mask."""

from __future__ import annotations

import random

import pytest
import torch

from services.kernels import attention_plan
from services.kernels.attention_plan import Layout, group_work
from services.verifier.batch import Work, plan


def random_works(rng: random.Random, layout: Layout, count: int) -> list[Work]:
    free = rng.sample(range(layout.num_pages), layout.num_pages)
    works = []
    for _ in range(count):
        rows, start = rng.choice([1, 1, 4, rng.randint(1, 30)]), rng.choice([0, rng.randint(0, 60)])
        pages = [free.pop() for _ in range(-(-(start + rows) // layout.page_size))]
        works.append(Work([rng.randrange(330) for _ in range(rows)], start, rng.choice([0, 1, rows]), pages))
    return works


@pytest.fixture(params=range(8))
def step(request: pytest.FixtureRequest) -> tuple[Layout, list[Work]]:
    rng = random.Random(request.param)
    layout = Layout(600, rng.choice([1, 2, 4, 16]), rng.choice([1, 2, 3]), torch.float32)
    return layout, random_works(rng, layout, rng.randint(1, 6))


@pytest.mark.parametrize("cost", [0, 200, 4096, 10**9])
def test_groups_partition_the_requests(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_GROUP_COST", cost)
    rng = random.Random(cost)
    for _ in range(200):
        sizes = [
            (rng.choice([1, 1, 1, 8, rng.randint(1, 500)]), rng.randint(1, 4000)) for _ in range(rng.randint(1, 20))
        ]
        groups = group_work(sizes)
        assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
        assert all(groups)


def test_groups_of_little_waste() -> None:
    assert group_work([(1, 100)] * 40) == [list(range(40))]
    # Alike requests stay together, one that would pad the others to its own size does not.
    groups = group_work([(1, 100), (400, 400), (1, 120), (1, 90)])
    assert sorted(map(sorted, groups)) == [[0, 2, 3], [1]]
    groups = group_work([(1, 30_000), (1, 10), (1, 10)])
    assert sorted(map(sorted, groups)) == [[0], [1, 2]]
    # Nor does one that is cheap to pad itself, but pads forty others.
    groups = group_work([(2, 100)] * 40 + [(1, 3000)])
    assert sorted(map(len, groups)) == [1, 40]
    for sizes in ([(1, 5000), (1, 10), (8, 100), (8, 90), (300, 300)], [(4, 50)] * 3 + [(1, 6000)] * 3):
        padded = sum(
            len(group) * max(sizes[i][0] for i in group) * max(sizes[i][1] for i in group)
            for group in group_work(sizes)
        )
        alone = sum(q * k for q, k in sizes)
        assert padded - alone <= attention_plan._GROUP_COST * len(sizes)


def test_rows_of_the_step(step: tuple[Layout, list[Work]]) -> None:
    """Tokens, positions, sample rows, and the cache cells that take each row's K and V."""
    layout, works = step
    batch, order = plan(works, layout)
    assert sorted(order) == list(range(len(works)))
    rows = [(works[i], j) for i in order for j in range(len(works[i].tokens))]
    assert batch.tokens.tolist() == [work.tokens[j] for work, j in rows]
    assert batch.positions.tolist() == [work.start + j for work, j in rows]
    sampled = [r for r, (work, j) in enumerate(rows) if j >= len(work.tokens) - work.samples]
    assert batch.sample_rows.tolist() == sampled
    cells = []
    for work, j in rows:
        page, offset = divmod(work.start + j, layout.page_size)
        for head in range(2 * layout.num_kv_heads):
            cells.append((head * layout.num_pages + work.pages[page]) * layout.page_size + offset)
    assert batch.slots.tolist() == cells


def test_what_each_query_sees(step: tuple[Layout, list[Work]]) -> None:
    """Follows pages, mask, pad and unpad back to (request, key position) pairs."""
    layout, works = step
    batch, order = plan(works, layout)
    left, row = list(order), 0
    for group in batch.groups:
        members, left = left[: group.requests], left[group.requests :]
        lengths = [len(works[i].tokens) for i in members]
        assert group.rows == (row, row + sum(lengths))
        row += sum(lengths)
        assert group.queries == max(lengths) and group.mask.shape == (1, group.requests, group.queries, 1, group.keys)
        assert (group.pad is None) == (group.unpad is None) == (len(set(lengths)) == 1)
        count = group.keys // layout.page_size
        table = group.pages.view(2 * layout.num_kv_heads, group.requests, count)
        slots = torch.arange(group.requests * group.queries)
        back = slots if group.unpad is None else group.unpad
        first = 0
        for r, i in enumerate(members):
            work = works[i]
            for head in range(2 * layout.num_kv_heads):
                used = (table[head, r] - head * layout.num_pages).tolist()
                assert used[: len(work.pages)] == work.pages and all(0 <= p < layout.num_pages for p in used)
            for j in range(len(work.tokens)):
                slot = int(back[first + j])
                assert slot // group.queries == r
                assert group.pad is None or int(group.pad[slot]) == first + j
                mask = group.mask[0, r, slot % group.queries, 0]
                assert mask.eq(0).nonzero().flatten().tolist() == list(range(work.start + j + 1))
                assert torch.isneginf(mask[work.start + j + 1 :]).all()
            first += len(work.tokens)
        # Padded queries read rows of the group and see something, or softmax gives NaN.
        assert group.pad is None or 0 <= int(group.pad.min()) <= int(group.pad.max()) < sum(lengths)
        assert group.mask.eq(0).any(dim=-1).all()
    assert not left and row == len(batch.tokens)


def test_contexts_are_padded_to_few_sizes() -> None:
    layout = Layout(200, 16, 2, torch.float32)
    sizes = set()
    for before in range(0, 512, 7):
        pages = list(range(-(-(before + 1) // 16)))
        batch, _ = plan([Work([1], before, 1, pages)], layout)
        sizes.add(batch.groups[0].keys)
    assert sizes == {64 * n for n in range(1, 9)}
