"""Edited rows on their way through `draw`: alone or in company, next to rows without edits, at the extremes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from services.model.edits import Edits, apply
from services.model.probs import RowLaw, draw
from tests.support import noise


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


def some_edits(rng: random.Random, vocab: int) -> Edits:
    def few() -> torch.Tensor:
        return torch.tensor(rng.sample(range(vocab), rng.randint(1, vocab // 2)))

    seen, produced = few(), few()
    return Edits(
        bias=rng.choice([None, (ids(1, 4), torch.tensor([3.0, -100.0]))]),
        repetition=1.5,
        seen=rng.choice([None, seen]),
        frequency=0.5,
        presence=-0.25,
        produced=rng.choice([None, (produced, torch.arange(1.0, 1 + len(produced)))]),
        allowed=rng.choice([None, few()]),
        held=rng.choice([None, ids(0)]),
        banned=rng.choice([None, few()]),
    )


def edited(row: torch.Tensor, edits: Edits) -> np.ndarray:
    row = row.float().clone()
    apply(row, edits)
    return row.numpy()


@pytest.mark.parametrize("vocab", [30, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_draws_each_row_as_if_alone(vocab: int, dtype: torch.dtype) -> None:
    """Greedy and sampled, edited and not; filters see the logits as they were edited."""
    rng = random.Random(vocab)
    count = 300
    laws = [
        RowLaw(
            rng.choice([0.0, 0.7, 1.3]),
            rng.choice([0, 0, 3, 1000]),
            rng.choice([1.0, 0.6]),
            rng.getrandbits(64),
            i,
            rng.choice([0.0, 0.0, 0.1]),
            some_edits(rng, vocab) if i % 3 else None,
        )
        for i in range(count)
    ]
    logits = (torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
    before = logits.clone()
    together = draw(logits, laws)
    assert torch.equal(logits, before)
    assert together == [draw(logits[i : i + 1], laws[i : i + 1])[0] for i in range(count)]
    for law, row, got in zip(laws, logits, together, strict=True):
        wide = edited(row, law.edits) if law.edits is not None else row.float().numpy()
        if law.temperature and law.min_p:
            wide = np.where(wide < wide.max() + law.temperature * np.log(law.min_p), -np.inf, wide)
        wanted, lead = noise.choose(wide, law.temperature, law.top_k, law.top_p, law.seed, law.position)
        assert got == wanted or lead < 1e-4, law


FILTERS = list(itertools.product([0.0, 1e-45, 1.0, 100.0], [0, 1, 5, 40], [1.0, 0.5, 1e-8], [0.0, 0.5, 1.0]))


def laws(edits: Edits) -> list[RowLaw]:
    return [RowLaw(t, k, p, seed, 7, m, edits) for seed, (t, k, p, m) in enumerate(FILTERS)]


@pytest.mark.parametrize(
    "edits",
    [
        Edits(allowed=ids(11)),
        Edits(allowed=ids(11), banned=ids(11)),
        Edits(allowed=ids(11), repetition=3e38, seen=torch.arange(20)),
        Edits(allowed=ids(11), repetition=1e-38, seen=torch.arange(20)),
        Edits(allowed=ids(11), frequency=3e38, produced=(ids(11), torch.tensor([9.0]))),
        Edits(allowed=ids(3, 11), held=ids(3)),
        Edits(allowed=ids(3, 11, 12), held=ids(3), banned=ids(12)),
        Edits(banned=torch.tensor([i for i in range(20) if i != 11])),
        Edits(allowed=ids(3, 11), bias=(ids(3, 11), torch.tensor([-3e38, 3e38]))),
    ],
)
def test_the_only_one_left_is_drawn(edits: Edits) -> None:
    """Whatever the filters, also where 11 is by far the worst, or the penalty overflows."""
    for row in (torch.randn(20), torch.arange(20) * -50.0, torch.arange(20) * 1e36 * (-1) ** torch.arange(20)):
        assert set(draw(row.expand(len(FILTERS), -1), laws(edits))) == {11}


def test_a_bias_of_a_hundred_decides() -> None:
    row = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 3
    sampled = [RowLaw(t, 0, 1.0, seed, 7, 0.0, None) for t in (0.0, 0.7, 1.0) for seed in range(200)]

    def drawn(*bias: tuple[int, float]) -> set[int]:
        edits = Edits(bias=(ids(*[i for i, _ in bias]), torch.tensor([b for _, b in bias])))
        return set(draw(row.expand(600, -1), [RowLaw(x.temperature, 0, 1.0, x.seed, 7, 0.0, edits) for x in sampled]))

    assert drawn((4, 100.0)) == {4}
    assert drawn((4, 100.0), (5, 100.0)) <= {4, 5}
    assert not drawn(*[(i, -100.0) for i in range(15)]) & set(range(15))


def test_noise_reaches_as_far_below_the_best_of_what_is_left() -> None:
    """The best id lies 40 above the rest; once it is excluded, all others are drawn again."""
    row = torch.zeros(8)
    row[2] = 40.0
    plain = [RowLaw(1.0, 0, 1.0, seed, 7) for seed in range(300)]
    without = [RowLaw(1.0, 0, 1.0, seed, 7, 0.0, Edits(banned=ids(2))) for seed in range(300)]
    assert set(draw(row.expand(300, -1), plain)) == {2}
    assert set(draw(row.expand(300, -1), without)) == {0, 1, 3, 4, 5, 6, 7}


def test_no_edits_no_change() -> None:
    assert not Edits(repetition=2.0, frequency=1.0, presence=1.0).any
    assert Edits(allowed=ids(1)).any and Edits(seen=ids(1)).any
