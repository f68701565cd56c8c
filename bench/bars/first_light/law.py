"""Plain sampling follows its law: two tokens in a row of a tiny model, counted over seeds, against their exact law.

The law is written out anew here in float64: temperature, then the smallest set of likeliest tokens that reaches top-p.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import torch

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from services.kernels.attention_plan import Layout
from services.model.probs import RowLaw, draw
from services.verifier import batch
from services.verifier.paged_kv import PagePool, allocate_caches
from services.verifier.target import Target

MINUTES = 0.5
_VOCABULARY, _SEEDS = 16, 20_000
_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_LAWS = ((0.8, 0.95), (1.0, 1.0), (1.5, 0.7))
_MIN_EXPECTED = 5  # rarer outcomes are counted together, as the test's approximation asks


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One bar per law: how far the counts lie from it, in standard deviations. Seeds are fixed: it never flickers."""
    with tempfile.TemporaryDirectory() as folder:
        target = _tiny(Path(folder))
    contexts = [_PROMPT, *([*_PROMPT, token] for token in range(_VOCABULARY))]
    logits = [_logits(target, ids) for ids in contexts]
    seeds = range(bench.rounds(_SEEDS))
    for temperature, top_p in _LAWS:
        first = [_law(row.double().numpy(), temperature, top_p) for row in logits]
        exact = {(a, b): first[0][a] * first[1 + a][b] for a in range(_VOCABULARY) for b in range(_VOCABULARY)}
        drawn = Counter(_pairs(logits, temperature, top_p, seeds))
        outside = sum(count for pair, count in drawn.items() if exact[pair] == 0)
        score = math.inf if outside else _deviation(drawn, exact, len(seeds))
        note = f"{len(seeds)} seeds, {sum(p > 0 for p in exact.values())} possible pairs"
        yield Bar(f"law at temperature {temperature}, top-p {top_p}", score, "<=", 4, unit="sigma", note=note)


def _pairs(logits: list[torch.Tensor], temperature: float, top_p: float, seeds: range) -> list[tuple[int, int]]:
    at = len(_PROMPT)
    one = draw(logits[0].expand(len(seeds), -1), [RowLaw(temperature, 0, top_p, seed, at) for seed in seeds])
    rows = torch.stack([logits[1 + token] for token in one])
    two = draw(rows, [RowLaw(temperature, 0, top_p, seed, at + 1) for seed in seeds])
    return list(zip(one, two, strict=True))


def _law(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """The exact law [V]."""
    law = np.exp(logits / temperature - np.max(logits / temperature))
    law /= law.sum()
    order = np.argsort(-law, kind="stable")
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= top_p]] = 0.0
    return law / law.sum()


def _deviation(drawn: Counter[tuple[int, int]], exact: dict[tuple[int, int], float], count: int) -> float:
    """Chi-square of the counts as a normal deviate (Wilson and Hilferty 1931)."""
    common = [pair for pair, p in exact.items() if p * count >= _MIN_EXPECTED]
    seen, due = [float(drawn[pair]) for pair in common], [exact[pair] * count for pair in common]
    if (rest := count - sum(due)) >= _MIN_EXPECTED:
        seen.append(count - sum(seen))
        due.append(rest)
    chi2 = sum((s - d) ** 2 / d for s, d in zip(seen, due, strict=True))
    freedom = len(due) - 1
    return ((chi2 / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def _logits(target: Target, ids: list[int]) -> torch.Tensor:
    pool = PagePool(8, 16)
    pages = pool.open()
    assert pool.reserve(pages, len(ids))
    layout = Layout(8, 16, target.arch.num_kv_heads, target.dtype)
    forward, _ = batch.plan([batch.Work(ids, 0, 1, pages.pages)], layout)
    return target.forward(forward, allocate_caches(target.arch, 8, 16, target.dtype))[0].clone()


def _tiny(folder: Path) -> Target:
    """A model of the served family with random weights, loaded as any other."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    target = Target(folder, "float32")
    target.prepare(64)
    return target
