"""The bars of the trained drafter: what is counted, what is chosen, and what is left out."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from bench.bars import groups
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.bars.train import ablation, acceptance, recipe, speed
from bench.load import Answer
from bench.tasks import Prompts
from kadence import GenerateResult, Stats
from services.drafter.draft_arch import read_draft_arch
from tests.support.tiny_drafter import write_drafter
from training.acceptance import Acceptance, Counted

BENCH = Bench("train/x", Prompts({"gsm8k": ["a", "b"], "other": ["c"]}), False, 0.0, Path("/drafter"))


def test_the_train_group() -> None:
    found = {capability.name.partition("/")[2]: capability for capability in groups.capabilities("train")}
    assert set(found) == {"acceptance", "ablation", "speed", "recipe"}
    for capability in found.values():
        assert inspect.isasyncgenfunction(importlib.import_module(capability.module).measure)


def counted(*pairs: tuple[int, int]) -> Acceptance:
    """Requests of so many tokens and steps."""
    return Acceptance(tuple(Counted((1,), tuple(range(n + 1)), n + 1, steps) for n, steps in pairs))


async def bars_of(module: Any, bench: Bench) -> dict[str, Bar]:
    return {bar.name: bar async for bar in module.measure(bench)}


async def test_acceptance_is_held_against_limits_and_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"gsm8k": counted((30, 10), (24, 10)), "other": counted((10, 10))}
    ngram = {"gsm8k": counted((30, 11)), "other": counted((12, 10))}
    monkeypatch.setattr(acceptance, "by_task", lambda bench, path, name: ours if path else ngram)
    found = await bars_of(acceptance, BENCH)
    assert {name: (bar.measured, bar.limit, bar.passed) for name, bar in found.items()} == {
        "gsm8k": (2.7, 2.5, True),
        "gsm8k, above n-grams": (2.7, 30 / 11, False),
        "gsm8k, above a lightly trained one": (2.7, 1.98, True),
        "other": (1.0, None, None),
        "other, above n-grams": (1.0, 1.2, False),
    }
    assert found["gsm8k"].note == "mean of 2 requests 2.70; 0% left out in loops"


async def test_ablation_compares_and_tells_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, bare = {"gsm8k": counted((30, 10), (30, 12))}, {"gsm8k": counted((30, 12), (30, 15))}
    monkeypatch.setattr(ablation, "without_selector", lambda folder, out: out)
    monkeypatch.setattr(ablation, "by_task", lambda bench, path, name, count: whole if path == tmp_path else bare)
    bench = Bench("train/x", BENCH.prompts, False, 0.0, tmp_path)
    (bar,) = (await bars_of(ablation, bench)).values()
    assert bar.name == "selector, gsm8k" and bar.measured == pytest.approx(27 / 22) and bar.passed
    assert bar.spread == (12 / 10, 15 / 12)
    card = {"convolution": {"with": {"gsm8k": 2.2}, "without": {"gsm8k": 2.0}, "budget": "9 minutes"}}
    (tmp_path / "ablation.json").write_text(json.dumps(card))
    *_, bar = (await bars_of(ablation, bench)).values()
    assert bar.measured == 2.2 / 2.0 and bar.passed is None and "9 minutes" in bar.note


def answer(ids: list[int], *arrivals: tuple[float, int]) -> Answer:
    return Answer(GenerateResult("", tuple(ids), "length", Stats(), (), 0, "match", "", ""), list(arrivals))


def test_rate_ends_where_an_answer_loops() -> None:
    assert speed.rate_of(answer(list(range(9)), (1.0, 1), (1.5, 4), (3.0, 4))) == 8 / 2.0
    loop = [*range(16)] * 3  # 16-grams come again from token 32 on
    assert speed.rate_of(answer(loop, (1.0, 1), (2.0, 29), (3.0, 3), (9.0, 15))) == 32 / 2.0


def test_the_best_length_is_that_of_all_tasks() -> None:
    rates = {
        "a": {0: [10.0], 2: [14.0], 3: [15.0], 5: [19.0], 7: [20.0]},
        "b": {0: [5.0], 2: [6.0], 3: [7.0], 5: [6.0], 7: [3.0]},
        "c": {0: [], 2: [], 3: [], 5: [], 7: []},
    }
    assert speed.best_length(rates) == 5


async def test_recipe_says_that_it_is_left_out() -> None:
    (bar,) = (await bars_of(recipe, BENCH)).values()
    assert bar.passed is None and "left out: --features" in bar.note


def test_recipe_takes_the_checkpoints_shape(tmp_path: Path) -> None:
    found = recipe.shaped(read_draft_arch(write_drafter(tmp_path, "dflash2")))
    assert (found.layers, found.rank, found.taps, found.block, found.convolution) == (2, 8, (0, 2), 8, True)
    bare = recipe.shaped(read_draft_arch(write_drafter(tmp_path, "dflash")))
    assert (bare.kind, bare.rank, bare.convolution) == ("dflash", 0, False)


def test_prompts_hold_any_character(tmp_path: Path) -> None:
    """Line separators of Unicode stand in texts as they are; only line feeds end lines."""
    text = "one\u2028two\x85three\x0bfour"
    (tmp_path / "a.jsonl").write_text(json.dumps({"task": "x", "prompt": text}, ensure_ascii=False) + "\n")
    assert Prompts.read(tmp_path).by_task == {"x": [text]}
