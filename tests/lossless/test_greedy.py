"""Greedy ids equal transformers' generate(), for any K, drafter, batch, pool and chunking."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.verifier.request import FinishReason
from services.verifier.target import Target
from tests.support import scripted_drafter as drafters
from tests.support.engine_harness import Answer, Harness, request
from tests.support.scripted_drafter import FaultyDrafter, ScriptedDrafter
from tests.support.tiny_llama import TinyLlama

VOCAB, COUNT = 330, 20
ROOMY: dict[str, Any] = {"max_num_seqs": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "eight at a time": {"max_num_seqs": 8},
    "all at once": ROOMY,
    # 24 prompts of up to 60 tokens over 120 cells: most are pre-empted, some more than once.
    "few pages": {**ROOMY, "num_pages": 30, "page_size": 4, "max_model_len": 100},
    # Prompts come in chunks; 24 requests leave room for hardly any draft.
    "small steps": {**ROOMY, "max_num_batched_tokens": 24, "page_size": 16},
    "pages of one": {"max_num_seqs": 5, "num_pages": 100, "page_size": 1, "max_model_len": 100},
}


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Target:
    return Target(tiny_llama.folder, "float32")


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    rng = random.Random(0)
    return {str(i): [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 7, 8, 9, 31, 60]))] for i in range(24)}


@pytest.fixture(scope="module")
def truth(tiny_llama: TinyLlama, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Prompt and continuation by transformers."""
    return {name: prompt + tiny_llama.generate(prompt, COUNT) for name, prompt in prompts.items()}


class Case:
    """24 prompts, one engine."""

    def __init__(self, llama: TinyLlama, target: Target, prompts: dict[str, list[int]], truth: dict[str, list[int]]):
        self.llama, self.target, self.prompts, self.truth = llama, target, prompts, truth

    def drafter(self, kind: str, seed: int = 0) -> ScriptedDrafter:
        rng = random.Random(seed)
        match kind:
            case "right":
                return ScriptedDrafter(drafters.oracle(self.truth))
            case "wrong":
                return ScriptedDrafter(drafters.wrong(self.truth, VOCAB))
            case "random":
                return ScriptedDrafter(lambda name, tokens, most: [rng.randrange(VOCAB) for _ in range(most)])
            case "partly right":
                return ScriptedDrafter(drafters.partly(self.truth, VOCAB, seed, 0.8))
        return FaultyDrafter(drafters.partly(self.truth, VOCAB, seed, 0.9), seed)

    def run(self, kind: str = "", k: int = 0, **shape: Any) -> Harness:
        """Decodes all prompts and compares."""
        if kind == "faulty":
            shape = {"draft_deadline_seconds": 0.002, **shape}
        harness = Harness(self.target, k=k, drafter=self.drafter(kind) if kind else None, **shape)
        answers = harness.run([request(name, prompt, COUNT) for name, prompt in self.prompts.items()])
        for name, prompt in self.prompts.items():
            self.llama.assert_same(prompt, answers[name].tokens, self.truth[name][len(prompt) :])
            assert answers[name].terminal is not None
            assert answers[name].terminal.reason == FinishReason.LENGTH
        return harness


@pytest.fixture(scope="module")
def case(tiny_llama: TinyLlama, target: Target, prompts: dict[str, list[int]], truth: dict[str, list[int]]) -> Case:
    return Case(tiny_llama, target, prompts, truth)


def test_the_reference_is_worth_comparing_with(truth: dict[str, list[int]]) -> None:
    """Continuations differ and are not loops, so that a wrong step shows."""
    tails = {tuple(tokens[-8:]) for tokens in truth.values()}
    assert len(tails) >= 20 and sum(len(set(tail)) for tail in tails) / len(tails) > 5


@pytest.mark.parametrize("shape", SHAPES)
def test_plain(case: Case, shape: str) -> None:
    load = case.run(**SHAPES[shape]).engine.load()
    assert load.stats.verified == 0 and load.stats.generated == 24 * COUNT
    assert (load.stats.preemptions > 0) == (shape in ("few pages", "pages of one"))
    if shape == "all at once":
        assert load.stats.steps == COUNT  # all prompts fit one step, and nobody waits for anybody


@pytest.mark.parametrize("shape", ["all at once", "few pages", "small steps"])
@pytest.mark.parametrize("kind", ["right", "wrong", "random", "partly right", "faulty"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_drafts_change_nothing(case: Case, k: int, kind: str, shape: str) -> None:
    harness = case.run(kind, k, **SHAPES[shape])
    stats = harness.engine.load().stats
    assert 0 < stats.verified <= stats.drafted
    assert len(stats.k_hist) <= k + 1 and sum(stats.k_hist) == stats.request_steps
    if shape == "all at once":
        low, high = {"right": (1.0, 1.0), "wrong": (0.0, 0.0), "random": (0.0, 0.1)}.get(kind, (0.2, 0.95))
        assert low <= stats.accepted / stats.verified <= high
        if kind == "right":
            assert stats.request_steps == 24 * -(-(COUNT - 1) // (k + 1))  # prefill gives the first token


@pytest.mark.parametrize("shape", ["one at a time", "eight at a time", "pages of one"])
@pytest.mark.parametrize("kind", ["right", "partly right", "faulty"])
def test_drafts_change_nothing_in_smaller_batches(case: Case, kind: str, shape: str) -> None:
    case.run(kind, 7, **SHAPES[shape])


def test_bounds_are_kept(case: Case) -> None:
    """No step runs more rows or requests than allowed, and chunks and drafts do fill what is there."""
    for kind, k in (("", 0), ("right", 7)):
        harness = case.run(kind, k, max_num_seqs=6, max_num_batched_tokens=16)
        assert max(report.rows for report in harness.reports) == 16
        assert max(report.load.running for report in harness.reports) == 6


def finish(case: Case, name: str, kind: str, **options: Any) -> Answer:
    harness = Harness(case.target, k=7 if kind else 0, drafter=case.drafter(kind) if kind else None)
    return harness.run([request(name, case.prompts[name], **options)])[name]


@pytest.mark.parametrize("kind", ["", "right", "partly right"])
def test_stop_ids(case: Case, kind: str) -> None:
    """The answer ends with the first stop id, also in the middle of an accepted draft, and as generate() ends."""
    for name, prompt in case.prompts.items():
        answer = case.truth[name][len(prompt) :]
        stops = [answer[9], answer[13]]
        wanted = case.llama.generate(prompt, COUNT, stops)
        got = finish(case, name, kind, max_tokens=COUNT, stop=stops)
        assert got.tokens == wanted and got.terminal is not None
        assert (got.terminal.reason, got.terminal.stop_token_id) == (FinishReason.STOP, wanted[-1])


@pytest.mark.parametrize("kind", ["", "right"])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_max_tokens(case: Case, count: int, kind: str) -> None:
    for name in ("0", "5"):
        got = finish(case, name, kind, max_tokens=count)
        assert got.tokens == case.truth[name][len(case.prompts[name]) :][:count]
        assert got.terminal is not None and got.terminal.reason == FinishReason.LENGTH
        assert all(update.drafted <= count - 1 for update in got.updates)


def test_own_cap_on_drafts(case: Case) -> None:
    for cap in (0, 2):
        got = finish(case, "3", "right", max_tokens=COUNT, max_draft_tokens=cap)
        assert max(update.drafted for update in got.updates) == cap


@pytest.mark.parametrize("kind", ["", "partly right"])
@pytest.mark.parametrize("committed", [1, 7, COUNT - 1])
def test_a_later_attempt_goes_on_where_the_earlier_one_stopped(case: Case, committed: int, kind: str) -> None:
    for name in ("2", "4", "6"):
        answer = case.truth[name][len(case.prompts[name]) :]
        got = finish(case, name, kind, max_tokens=COUNT, committed=answer[:committed], attempt=1)
        assert got.tokens == answer[committed:]
