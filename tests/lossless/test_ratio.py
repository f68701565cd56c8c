"""Rule `ratio` through a real engine: the ids of its definition with every option, and the model's own law."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_weights import load_draft
from services.drafter.methods import Setting, create
from services.runtime.config import ModelConfig
from services.verifier.request import FinishReason, Request
from services.verifier.target import Target
from tests.support import noise, plain_ratio
from tests.support.engine_harness import Harness, request
from tests.support.method_drafter import MethodDrafter
from tests.support.plain_ratio import LawDrafter, Propose
from tests.support.plain_sampling import Logits, Plain
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.stats import chi_square_p
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama

VOCAB, COUNT = 40, 14
CANDIDATES = {"one-hot": 0, "few candidates": 3, "many candidates": 16}
ALONE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1, "top_p": 0.9, "top_k": 12},
    {"temperature": 1.6, "repetition_penalty": 1.8, "presence_penalty": 1.0},
    {"frequency_penalty": -1.0},
    {"logit_bias": {3: 3.0, 5: 2.0, 7: -2.5}},
    {"allowed_token_ids": (2, 3, 5, 8, 13, 21, 34)},
    {"bad_words": tuple((i,) for i in range(10, 30))},
    {"stop": (3, 4, 5, 6, 7, 8), "min_tokens": 3},
]


@dataclass(frozen=True)
class Case:
    """One request under rule `ratio`, and what the definition says it gives."""

    name: str
    options: dict[str, Any]
    plain: Plain
    attempt: int
    committed: tuple[int, ...]
    logprobs: int | None

    def request(self) -> Request:
        resumed = {"committed": self.committed, "attempt": self.attempt}
        own = {"rule": "ratio", "logprobs": self.logprobs}
        return request(self.name, self.plain.prompt, COUNT, **own, **resumed, **self.options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("ratio"), seed=11, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target(llama: TinyLlama) -> Target:
    return Target(llama.folder, "float32")


@pytest.fixture(scope="module")
def logits(llama: TinyLlama) -> Logits:
    known: dict[tuple[int, ...], np.ndarray] = {}

    def of(tokens: list[int]) -> np.ndarray:
        if tuple(tokens) not in known:
            known[tuple(tokens)] = llama.logits(tokens)[-1].numpy()
        return known[tuple(tokens)]

    return of


def cases(logits: Logits, propose: Propose, k: int) -> list[Case]:
    """Each option alone, first attempts and later ones, with prompts and seeds that leave nothing to rounding."""
    rng, found = random.Random(k), []
    for index, alone in enumerate([*ALONE, *ALONE]):
        resumed = index >= len(ALONE)
        for _ in range(20):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 8, 20]))]
            options = {"temperature": 1.0, "seed": rng.getrandbits(64), **alone}
            attempt, committed = (index % 3 + 1, (9, 11, 13)[: 1 + index % 3]) if resumed else (0, ())
            plain = plain_ratio.decode(logits, prompt, COUNT, options, propose, k, attempt, committed)
            if plain.clear:
                logprobs = rng.choice([None, 0, 3])
                found.append(Case(str(index), options, plain, attempt, committed, logprobs))
                break
        else:
            raise AssertionError(f"{alone}: roundings may decide every one of 20 prompts")
    return found


@pytest.mark.parametrize(("k", "kind"), [(0, "one-hot"), *itertools.product([3, 7], CANDIDATES)])
def test_ids_are_those_of_the_definition(target: Target, logits: Logits, k: int, kind: str) -> None:
    propose = plain_ratio.drafts(logits, VOCAB, CANDIDATES[kind], seed=k)
    wanted = cases(logits, propose, k)
    harness = Harness(target, k=k, drafter=LawDrafter(propose))
    answers = harness.run([case.request() for case in wanted])
    for case in wanted:
        answer = answers[case.name]
        assert answer.tokens == case.plain.tokens, case
        stopped = case.plain.tokens[-1] in case.options.get("stop", ())
        assert answer.terminal is not None
        assert answer.terminal.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        entries = [entry for update in answer.updates for entry in update.logprobs]
        assert len(entries) == (0 if case.logprobs is None else len(answer.tokens))
        for entry, token, table in zip(entries, answer.tokens, case.plain.table, strict=False):
            assert abs(entry.logprob - table[token]) < 1e-4 and len(entry.top) == case.logprobs
    stats = harness.engine.load().stats
    if k:
        assert 20 < stats.accepted < 0.95 * stats.verified
    assert len({tuple(case.plain.tokens) for case in wanted}) > 0.8 * len(wanted)


def test_more_is_accepted_than_by_match(target: Target, logits: Logits) -> None:
    """Drafts drawn from nearly the model's law, of which `match`, whose noise they do not share, accepts few."""
    accepted = {}
    for rule in ("match", "ratio"):
        harness = Harness(target, k=3, drafter=LawDrafter(plain_ratio.drafts(logits, VOCAB, 16, seed=1)))
        harness.run([request(str(i), [i, 5], 20, temperature=1.0, seed=i, rule=rule) for i in range(16)])
        stats = harness.engine.load().stats
        accepted[rule] = stats.accepted / stats.verified
    assert accepted["ratio"] > accepted["match"] + 0.1


def test_both_rules_in_one_batch(target: Target, logits: Logits) -> None:
    """What `match` gives does not change by its neighbours, and at temperature 0 the rules are the same."""
    prompts = {str(i): [i, 7, 3] for i in range(12)}

    def run(rule_of_odd: str) -> dict[str, list[int]]:
        harness = Harness(target, k=4, drafter=LawDrafter(plain_ratio.drafts(logits, VOCAB, 3, seed=2)))
        work = []
        for i, prompt in enumerate(prompts.values()):
            rule = rule_of_odd if i % 2 else "match"
            options = {"temperature": 0.0 if i in (3, 7) else 0.9, "repetition_penalty": 1.2 if i % 3 else 1.0}
            work.append(request(str(i), prompt, 12, seed=i, rule=rule, logprobs=1, **options))
        return {name: answer.tokens for name, answer in harness.run(work).items()}

    one, other = run("match"), run("ratio")
    assert {i for i in prompts if one[i] != other[i]} == {"1", "5", "9", "11"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """Ten tokens, so that the law of three can be counted."""
    return TinyLlama(tmp_path_factory.mktemp("small"), seed=5, vocab_size=10, hidden_size=32, intermediate_size=32)


def law_after(
    llama: TinyLlama, prompt: list[int], length: int, temperature: float = 1.0, top_k: int = 0
) -> dict[Any, float]:
    """The model's own law of the next `length` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            ids, law = noise.survivors(llama.logits([*prompt, *tokens])[-1].numpy(), temperature, top_k, 1.0)
            longer |= {(*tokens, a): probability * p for a, p in zip(ids, law.tolist(), strict=True)}
        found = longer
    return found


@pytest.mark.parametrize(("drawn", "right"), [([0.5, 0.3, 0.2], True), ([1.0, 0.0, 0.0], False)])
def test_law_of_three_tokens(small: TinyLlama, drawn: list[float], right: bool) -> None:
    """Drafts far from the model's law: tokens come as the model says; and if the drafter lies, that is seen."""
    rng, prompt, count = random.Random(0), [3, 1, 4, 1, 5], 1200
    said = {7: 0.5, 2: 0.3, 5: 0.2}

    def propose(tokens: list[int], most: int) -> tuple[list[int], list[dict[int, float]]]:
        return rng.choices(list(said), drawn, k=most), [said] * most

    harness = Harness(Target(small.folder, "float32"), k=2, drafter=LawDrafter(propose), max_num_seqs=64)
    # The last token is never drafted; the first one comes with the prompt.
    work = [request(str(i), prompt, 4, seed=i, temperature=1.0, rule="ratio") for i in range(count)]
    seen = [tuple(answer.tokens[:3]) for answer in harness.run(work).values()]
    p = chi_square_p(seen, law_after(small, prompt, 3))
    assert p > 1e-3 if right else p < 1e-9
    assert harness.engine.load().stats.accepted > count / 10


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_law_with_a_block_drafter(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    """The real kinds: what they report is what they draw from, with noise of their own."""
    folder, prompt, count = tmp_path_factory.mktemp(kind), [3, 1, 4, 1, 5], 800
    llama = TinyLlama(folder / "model", seed=2, vocab_size=20, num_hidden_layers=TARGET_LAYERS)
    write_drafter(folder / "drafter", kind, seed=4, vocab_size=20, mask_token_id=19)
    weights = load_draft(folder / "drafter", read_draft_arch(folder / "drafter"), torch.float32).projection
    setting = Setting(3, 64, 16384, ModelConfig(path=str(llama.folder), dtype="float32"))
    drafter = MethodDrafter(create(kind, {"checkpoint": str(folder / "drafter")}, setting), weights)
    harness = Harness(Target(llama.folder, "float32"), k=3, drafter=drafter, max_num_seqs=64)
    work = [request(str(i), prompt, 5, seed=i, temperature=4.0, top_k=6, rule="ratio") for i in range(count)]
    seen = [tuple(answer.tokens[:3]) for answer in harness.run(work).values()]
    assert chi_square_p(seen, law_after(llama, prompt, 3, 4.0, 6)) > 1e-3
    stats = harness.engine.load().stats
    assert stats.verified > count and stats.accepted > count / 20 and not harness.drafting.counters.stale


def test_faulty_and_missing_drafts_leave_an_answer(target: Target) -> None:
    """Drafts that never come, and one-hot ones of nonsense: the answer has its length."""
    for drafter in (None, ScriptedDrafter(lambda name, tokens, most: [len(tokens) % VOCAB] * most)):
        harness = Harness(target, k=3, drafter=drafter, num_pages=20, page_size=4, max_model_len=60)
        answers = harness.run([request(str(i), [i], 20, seed=i, temperature=1.2, rule="ratio") for i in range(12)])
        assert all(len(answer.tokens) == 20 for answer in answers.values())
