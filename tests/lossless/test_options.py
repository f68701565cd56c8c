"""Every sampling option, alone and in random company: the ids and log-probabilities of plain decoding, at any K."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from services.verifier.request import FinishReason, Request
from services.verifier.target import Target
from tests.support import scripted_drafter as drafters
from tests.support.engine_harness import Answer, Harness, request
from tests.support.plain_sampling import Logits, Plain, decode
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_llama import TinyLlama

# So few tokens that answers repeat themselves and bad words come up.
VOCAB, COUNT, RANDOM = 40, 14, 110
ALONE: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "repetition_reward": {"repetition_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 2.0},
    "presence_reward": {"presence_penalty": -2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "frequency_reward": {"frequency_penalty": -1.0},
    "logit_bias": {"logit_bias": {3: 3.0, 5: 2.0, 7: -2.5}},
    "bias_to_one": {"logit_bias": {3: 100.0}},
    "bias_from_many": {"logit_bias": {i: -100.0 for i in range(0, VOCAB, 2)}},
    "allowed": {"allowed_token_ids": (2, 3, 5, 8, 13, 21, 34)},
    "allowed_one": {"allowed_token_ids": (9,)},
    "bad_tokens": {"bad_words": tuple((i,) for i in range(10, 30))},
    "bad_everything": {"allowed_token_ids": (4, 6, 11), "bad_words": ((4,), (6,), (11,), (1, 2))},
    "bad_vocabulary": {"bad_words": tuple((i,) for i in range(VOCAB))},
    "bad_words": {"own_words": True},
    "stop": {"own_stops": True},
    "min_tokens": {"own_stops": True, "min_tokens": 9},
}
UNCHANGED = {"bad_vocabulary"}


@dataclass(frozen=True)
class Case:
    """One request, what it must give, and what it would give without options (where that was needed)."""

    name: str
    options: dict[str, Any]
    plain: Plain
    bare: Plain | None
    logprobs: int | None

    def request(self, committed: int = 0) -> Request:
        tokens = self.plain.tokens[:committed]
        return request(self.name, self.plain.prompt, COUNT, committed=tokens, logprobs=self.logprobs, **self.options)

    def check(self, answer: Answer, committed: int = 0) -> None:
        """Ids, the end, and one entry of log-probabilities for each id."""
        assert answer.tokens == self.plain.tokens[committed:], (self.name, self.options)
        assert answer.terminal is not None
        stopped = self.plain.tokens[-1] in self.options.get("stop", ())
        assert answer.terminal.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        for update in answer.updates:
            assert len(update.logprobs) == (0 if self.logprobs is None else len(update.tokens))
        entries = [entry for update in answer.updates for entry in update.logprobs]
        for entry, token, table in zip(entries, answer.tokens, self.plain.table[committed:], strict=False):
            assert self.logprobs is not None and len(entry.top) == len(entry.top_ids) == self.logprobs
            assert abs(entry.logprob - table[token]) < 1e-4
            assert len(set(entry.top_ids)) == self.logprobs and entry.top == sorted(entry.top, reverse=True)
            # Ids whose values are the same but for rounding may change places.
            assert np.abs(np.array(entry.top) - np.sort(table)[::-1][: self.logprobs]).max(initial=0) < 1e-4
            assert np.abs(np.array(entry.top) - table[entry.top_ids]).max(initial=0) < 1e-4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("options"), seed=11, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target(llama: TinyLlama) -> Target:
    return Target(llama.folder, "float32")


def case(logits: Logits, rng: random.Random, name: str, options: dict[str, Any]) -> Case:
    """With a prompt and a seed that leave nothing to rounding; own stops and bad words come from the answer itself."""
    own_words, own_stops = options.pop("own_words", False), options.pop("own_stops", False)

    def plain(**changes: Any) -> Plain:
        return decode(logits, prompt, COUNT, changes)

    for _ in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 8, 20, 33]))]
        if options.get("temperature"):
            options["seed"] = rng.getrandbits(64)
        bare = None
        if own_words or name.partition(",")[0] in ALONE:
            bare = plain(**{key: options[key] for key in ("temperature", "seed") if key in options})
        if own_words and bare is not None:
            a = bare.tokens
            options["bad_words"] = ((prompt[-1], a[0]), tuple(a[2:5]), (a[6],), tuple(rng.sample(range(VOCAB), 3)))
        if own_stops:
            a = plain(**{key: value for key, value in options.items() if key not in ("stop", "min_tokens")}).tokens
            options["stop"] = (a[4], a[8], a[11])
        found = plain(**options)
        if found.clear:
            return Case(name, options, found, bare, rng.choice([None, 0, 1, 5, 20]))
    raise AssertionError(f"{name}: roundings may decide every one of 20 prompts")


def random_options(rng: random.Random) -> dict[str, Any]:
    def some(value: Any) -> Any:
        return value if rng.random() < 0.4 else None

    options = {
        "temperature": rng.choice([None, 0.7, 1.0, 1.6]),
        "min_p": some(rng.choice([0.02, 0.1, 0.3])),
        "top_k": some(rng.choice([1, 2, 5, 20, 1000])),
        "top_p": some(rng.choice([0.4, 0.8, 0.97])),
        "repetition_penalty": some(rng.choice([0.7, 1.2, 1.8])),
        "presence_penalty": some(rng.uniform(-2, 2)),
        "frequency_penalty": some(rng.uniform(-2, 2)),
        "logit_bias": some({rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(6)}),
        "allowed_token_ids": some(tuple(rng.sample(range(VOCAB), rng.randint(5, 30)))),
        "own_words": some(True),
        "own_stops": some(True),
        "min_tokens": some(rng.randint(1, COUNT)),
    }
    return {key: value for key, value in options.items() if value is not None}


@pytest.fixture(scope="module")
def cases(llama: TinyLlama) -> dict[str, Case]:
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(tokens: list[int]) -> np.ndarray:
        if tuple(tokens) not in known:
            known[tuple(tokens)] = llama.logits(tokens)[-1].numpy()
        return known[tuple(tokens)]

    rng = random.Random(5)
    found = [case(logits, rng, f"{name}, greedy", dict(options)) for name, options in ALONE.items()]
    found += [case(logits, rng, f"{name}, sampled", {**o, "temperature": 1.0}) for name, o in ALONE.items()]
    found += [case(logits, rng, f"random {i}", random_options(rng)) for i in range(RANDOM)]
    return {it.name: it for it in found}


def drafter(kind: str, cases: dict[str, Case]) -> ScriptedDrafter:
    """Drafts go on behind the end of an answer, as real ones do."""
    truth = {name: it.plain.prompt + it.plain.tokens + [1, 2, 3, 4, 5, 6, 7] for name, it in cases.items()}
    propose = {
        "right": lambda: drafters.oracle(truth),
        "wrong": lambda: drafters.wrong(truth, VOCAB),
        "half right": lambda: drafters.partly(truth, VOCAB, 3, 0.7),
    }[kind]()
    return ScriptedDrafter(propose)


def run(target: Target, cases: dict[str, Case], k: int, kind: str = "", **shape: Any) -> Harness:
    harness = Harness(target, k=k, drafter=drafter(kind, cases) if kind else None, **shape)
    answers = harness.run([it.request() for it in cases.values()])
    for name, it in cases.items():
        it.check(answers[name])
    return harness


def test_the_cases_are_worth_running(cases: dict[str, Case]) -> None:
    """Each option alone changes an answer that would be another without it; answers end early and late."""
    for name in ALONE.keys() - UNCHANGED:
        both = [cases[f"{name}, {how}"] for how in ("greedy", "sampled")]
        assert any(it.bare is not None and it.plain.tokens != it.bare.tokens for it in both), name
    for it in [cases[f"{name}, greedy"] for name in UNCHANGED]:
        assert it.bare is not None and it.plain.tokens == it.bare.tokens
    assert {len(it.plain.tokens) for it in cases.values()} >= {2, 5, 6, 7, 9, COUNT}
    assert len({tuple(it.plain.tokens) for it in cases.values()}) > 0.8 * len(cases)


def test_no_drafts(target: Target, cases: dict[str, Case]) -> None:
    run(target, cases, 0)


@pytest.mark.parametrize("kind", ["right", "wrong", "half right"])
@pytest.mark.parametrize("k", [3, 7])
def test_same_ids_whatever_is_drafted(target: Target, cases: dict[str, Case], k: int, kind: str) -> None:
    stats = run(target, cases, k, kind).engine.load().stats
    low, high = {"right": (0.8, 1.0), "wrong": (0.0, 0.0)}.get(kind, (0.1, 0.8))
    assert low <= stats.accepted / stats.verified <= high


def test_pre_emption_keeps_the_history(target: Target, cases: dict[str, Case]) -> None:
    few = {"num_pages": 20, "page_size": 4, "max_model_len": 60}
    assert run(target, cases, 3, "half right", **few).engine.load().stats.preemptions > 20


@pytest.mark.parametrize("k", [0, 7])
def test_a_later_attempt_goes_on_with_the_history(target: Target, cases: dict[str, Case], k: int) -> None:
    """Counts, min_tokens and words go on over what an earlier attempt committed."""
    starts = {name: i % len(it.plain.tokens) for i, (name, it) in enumerate(cases.items())}
    harness = Harness(target, k=k, drafter=drafter("half right", cases))
    answers = harness.run([it.request(starts[name]) for name, it in cases.items()])
    for name, it in cases.items():
        it.check(answers[name], starts[name])
