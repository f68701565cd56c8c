"""From logits to a law to a token: against brute force, against transformers' warpers, and by counting draws."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from services.kernels.noise_ref import noise_key
from services.model.edits import Edits
from services.model.probs import RowLaw, draw, draw_from, keep, log_laws, scale
from tests.support import noise
from tests.support.stats import chi_square_p

TOP_KS = [0, 1, 2, 3, 7, 15, 16, 17, 1000]
TOP_PS = [1e-6, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999, 1.0]


def rows(vocab: int = 16) -> list[torch.Tensor]:
    """Peaked, flat and tied rows, among them all tokens equal."""
    rng = torch.Generator().manual_seed(vocab)
    noise_rows = [torch.randn(vocab, generator=rng) * spread for spread in (0.1, 1.0, 3.0, 30.0)]
    tied = [torch.randint(-2, 3, (vocab,), generator=rng).float() for _ in range(6)]
    return [*noise_rows, *tied, torch.zeros(vocab), torch.arange(vocab).float(), -torch.arange(vocab).float()]


def on_the_edge(scaled: torch.Tensor, top_k: int, top_p: float) -> bool:
    """Whether a prefix has mass top_p to within rounding, so that it may end here or one later."""
    _, law = noise.survivors(scaled.numpy(), 1.0, top_k, 1.0)
    return bool((np.abs(law.cumsum() - top_p) < 1e-5).any())


@pytest.mark.parametrize("top_k", TOP_KS)
def test_keep_is_the_definition(top_k: int) -> None:
    for scaled, top_p in itertools.product(rows(), TOP_PS):
        if top_p < 1 and on_the_edge(scaled, top_k, top_p):
            continue
        wanted, _ = noise.survivors(scaled.numpy(), 1.0, top_k, top_p)
        assert keep(scaled, top_k, top_p).tolist() == wanted, (scaled, top_p)


def test_few_rows_are_on_the_edge() -> None:
    cases = list(itertools.product(rows(), TOP_KS, TOP_PS[:-1]))
    assert sum(on_the_edge(*case) for case in cases) < len(cases) / 10


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (50, 0.9), (20_000, 0.5), (0, 0.9999), (60_000, 0.7)])
def test_keep_over_a_large_vocabulary(top_k: int, top_p: float) -> None:
    rng = torch.Generator().manual_seed(1)
    for spread in (0.2, 2.5):
        scaled = torch.randn(50_000, generator=rng) * spread
        wanted, _ = noise.survivors(scaled.numpy(), 1.0, top_k, top_p)
        got = keep(scaled, top_k, top_p).tolist()
        # Tens of thousands of float32 masses add up to within a few of the least likely tokens.
        assert abs(len(got) - len(wanted)) <= len(wanted) // 2000
        shared = min(len(got), len(wanted))
        assert got[:shared] == wanted[:shared]


@pytest.mark.parametrize(("top_k", "top_p"), list(itertools.product([0, 1, 5, 40, 64, 99], [0.1, 0.6, 0.95, 1.0])))
def test_keep_agrees_with_transformers(top_k: int, top_p: float) -> None:
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(2)) * 3
    for temperature, min_p in itertools.product((0.3, 1.0, 1.7), (0.0, 0.003, 0.1, 0.7, 1.0)):
        scores = TemperatureLogitsWarper(temperature)(None, logits)
        if min_p:
            scores = MinPLogitsWarper(min_p)(None, scores)
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        for row, warped in zip(logits, scores, strict=True):
            wanted = set(torch.isfinite(warped).nonzero().flatten().tolist())
            assert set(keep(scale(row, temperature), top_k, top_p, min_p).tolist()) == wanted


def test_greedy_takes_the_best_and_of_ties_the_smaller_id() -> None:
    greedy = RowLaw(0.0, 0, 1.0, 5, 9)
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 2.0], [-1e30, -2e30, -1e30], [1.0, 1.0, 1.0]])
    assert draw(logits, [greedy] * 4) == [1, 0, 0, 0]
    # Filters and noise have no say.
    assert draw(logits, [RowLaw(0.0, 2, 0.1, seed, 1) for seed in range(4)]) == [1, 0, 0, 0]


@pytest.mark.parametrize("vocab", [1, 5, 330, 50_000])
def test_draw_is_gumbel_max_over_the_survivors(vocab: int) -> None:
    """Row by row: rows of many laws in one call, each drawn as if alone, by its own seed and position."""
    rng = random.Random(vocab)
    count = 400 if vocab < 1000 else 20
    laws = [
        RowLaw(
            rng.choice([0.0, 0.01, 0.7, 1.0, 5.0, 100.0]),
            rng.choice([0, 0, 0, 1, 2, 40]),
            rng.choice([1.0, 1.0, 0.3, 0.9]),
            rng.getrandbits(64),
            rng.randrange(8192),
        )
        for _ in range(count)
    ]
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 2
    for law, row, got in zip(laws, logits, draw(logits, laws), strict=True):
        wanted, lead = noise.choose(row.numpy(), law.temperature, law.top_k, law.top_p, law.seed, law.position)
        assert got == wanted or lead < 1e-4, law


def test_extreme_logits() -> None:
    """Neither overflow nor NaN: certain tokens are drawn, excluded ones are not."""
    sure = torch.tensor([[1e30, -1e30, 0.0], [-3e38, 3e38, 0.0], [-1e4, -2e4, -1e4 + 50]])
    for temperature, top_k, top_p in itertools.product([1e-45, 0.01, 1.0, 100.0], [0, 2, 5], [1.0, 0.5, 1e-8]):
        laws = [RowLaw(temperature, top_k, top_p, 1, 2)] * 2
        assert draw(sure[:2], laws) == [0, 1]
    assert draw(sure[2:], [RowLaw(1.0, 0, 0.9, 1, 2)]) == [2]
    # The coldest request anybody can send takes the best of two that overflow alike.
    close = torch.tensor([[7.0, 8.0, -9.0]])
    for top_k, top_p in itertools.product([0, 2], [1.0, 0.9]):
        assert draw(close, [RowLaw(1e-44, top_k, top_p, 1, 2)]) == [1]
    never = torch.tensor([[0.0, float("-inf"), 1.0]])
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.999)):
        laws = [RowLaw(1.0, top_k, top_p, seed, 0) for seed in range(100)]
        assert set(draw(never.expand(100, 3), laws)) == {0, 2}


def test_rows_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(60, 1000, generator=torch.Generator().manual_seed(4))
    laws = [RowLaw(1.0, (i % 3) * 7, 1.0 - (i % 2) * 0.1, i, i * i) for i in range(60)]
    together = draw(logits, laws)
    assert together == [draw(logits[i : i + 1], laws[i : i + 1])[0] for i in range(60)]
    order = random.Random(0).sample(range(60), 60)
    assert draw(logits[order], [laws[i] for i in order]) == [together[i] for i in order]


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    logits = (torch.randn(50, 300, generator=torch.Generator().manual_seed(5)) * 3).bfloat16()
    laws = [RowLaw(0.8, (i % 2) * 20, 1.0, i, 0) for i in range(50)]
    assert draw(logits, laws) == draw(logits.float(), laws)


@pytest.mark.parametrize("vocab", [1, 5, 330])
def test_log_laws_are_the_definition(vocab: int) -> None:
    laws = [
        RowLaw(temperature, top_k, top_p, 0, 0)
        for temperature, top_k, top_p in itertools.product([0.3, 1.0, 2.5], [0, 1, 2, 40, 1000], [1.0, 0.9, 0.3])
    ]
    logits = torch.randn(len(laws), vocab, generator=torch.Generator().manual_seed(6)) * 2
    before = logits.clone()
    for row, law, got in zip(logits, laws, log_laws(logits, laws), strict=True):
        ids, p = noise.survivors(row.numpy(), law.temperature, law.top_k, law.top_p)
        wanted = np.zeros(vocab)
        wanted[ids] = p
        assert np.abs(got.exp().numpy() - wanted).max() < 1e-5
        assert set(torch.isfinite(got).nonzero().flatten().tolist()) == set(ids)
    assert (logits == before).all()


def test_log_laws_after_edits_and_min_p() -> None:
    """The logits stay as they are: their own law is reported beside the answer."""
    logits = torch.tensor([[1.0, 2.0, 0.5, -3.0], [1.0, 2.0, 0.5, -3.0]])
    before = logits.clone()
    edits = Edits(allowed=torch.tensor([0, 2, 3]))
    table = log_laws(logits, [RowLaw(1.0, 0, 1.0, 0, 0, 0.1, edits), RowLaw(1.0, 0, 1.0, 0, 0, 0.1)])
    assert torch.isfinite(table).tolist() == [[True, False, True, False], [True, True, True, False]]
    ratios = torch.exp(table[:, 0] - table[:, 2])
    assert torch.allclose(ratios, torch.tensor(0.5).exp()) and torch.allclose(table.exp().sum(dim=-1), torch.ones(2))
    assert (logits == before).all()


def test_log_laws_of_extreme_logits() -> None:
    sure = torch.tensor([[1e30, -1e30, 0.0], [0.0, float("-inf"), 1.0]])
    for temperature, top_k, top_p in itertools.product([1e-45, 0.01, 1.0], [0, 2], [1.0, 0.5]):
        table = log_laws(sure, [RowLaw(temperature, top_k, top_p, 0, 0)] * 2)
        assert not table.isnan().any() and table[0, 0] == 0 and table[1, 1] == float("-inf")


def test_draw_from_any_weights() -> None:
    """Gumbel-max by its definition, whatever the weights sum to."""
    weights = torch.randn(300, 50, generator=torch.Generator().manual_seed(7)) * 4
    weights[torch.rand(300, 50, generator=torch.Generator().manual_seed(8)) < 0.5] = float("-inf")
    weights += torch.arange(300)[:, None] - 150.0
    chosen = draw_from(weights, [noise_key(i, 2, 3, 4, 5) for i in range(300)])
    for i, (row, token) in enumerate(zip(weights.numpy(), chosen, strict=True)):
        scores = row + noise.gumbel(i, 2, np.arange(50), 3, 4, 5)
        assert scores[token] > np.sort(scores)[-1] - 1e-4 and np.isfinite(row[token])


LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0, -2.0, 0.3, 0.9, -1.0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "draws"),
    [
        (1.0, 0, 1.0, 200_000),
        (0.4, 0, 1.0, 40_000),
        (2.5, 0, 1.0, 40_000),
        (1.0, 4, 1.0, 6_000),
        (1.3, 0, 0.8, 4_000),
        (0.9, 5, 0.85, 4_000),
    ],
)
def test_law(temperature: float, top_k: int, top_p: float, draws: int) -> None:
    """Over seeds and over positions, tokens come as often as softmax after filters says."""
    ids, law = noise.survivors(LOGITS.numpy(), temperature, top_k, top_p)
    wanted = dict(zip(ids, law.tolist(), strict=True))
    half = draws // 2
    for addresses in ([(seed, 1000) for seed in range(half)], [(77, position) for position in range(half)]):
        laws = [RowLaw(temperature, top_k, top_p, *address) for address in addresses]
        assert chi_square_p(draw(LOGITS.expand(half, -1), laws), wanted) > 1e-3


def test_seeds_and_positions_draw_independently() -> None:
    """Pairs of tokens at neighbouring positions, and of neighbouring seeds, follow the product of their laws."""
    n = 30_000
    ids, law = noise.survivors(LOGITS.numpy(), 1.0, 0, 1.0)
    product = {(a, b): p * q for (a, p), (b, q) in itertools.product(zip(ids, law, strict=True), repeat=2)}
    for neighbours in ([(0, 0), (0, 1)], [(0, 0), (1, 0)], [(0, 1), (1, 0)]):
        laws = [RowLaw(1.0, 0, 1.0, 2 * i + s, 2 * i + p) for i in range(n // 2) for s, p in neighbours]
        tokens = draw(LOGITS.expand(n, -1), laws)
        assert chi_square_p(zip(tokens[::2], tokens[1::2], strict=True), product) > 1e-3
