"""Rule `match`: sampled ids are a function of prompt, options and seed alone, and follow the law of plain sampling."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from services.verifier.request import Request
from services.verifier.target import Target
from tests.support import noise
from tests.support import scripted_drafter as drafters
from tests.support.engine_harness import Answer, Harness, request
from tests.support.scripted_drafter import FaultyDrafter, ScriptedDrafter
from tests.support.stats import chi_square_p
from tests.support.tiny_llama import NEAR_TIE, TinyLlama

VOCAB, COUNT = 330, 16
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.3},
    {"temperature": 0.0},
]
SHAPES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "all at once": {},
    "few pages": {"num_pages": 25, "page_size": 4, "max_model_len": 90},
    "small steps": {"max_num_seqs": 12, "max_num_batched_tokens": 16},
}


def prompts() -> dict[str, list[int]]:
    rng = random.Random(1)
    return {str(i): [rng.randrange(VOCAB) for _ in range(rng.choice([1, 6, 16, 40]))] for i in range(18)}


def options(name: str) -> dict[str, Any]:
    """Two prompts share a seed, one has the largest."""
    seed = {17: 2**64 - 1, 16: 5, 15: 5}.get(int(name), 1000 + int(name))
    return {**OPTIONS[int(name) % len(OPTIONS)], "seed": seed}


@pytest.fixture(scope="module")
def truth(tiny_llama: TinyLlama) -> dict[str, list[int]]:
    """Plain sampling, one token after the other, with transformers' logits and numpy's noise."""
    found = {}
    for name, prompt in prompts().items():
        o = options(name)
        tokens = list(prompt)
        for _ in range(COUNT):
            logits = tiny_llama.logits(tokens)[-1].numpy()
            token, lead = noise.choose(
                logits, o["temperature"], o.get("top_k", 0), o.get("top_p", 1.0), o["seed"], len(tokens)
            )
            assert lead > NEAR_TIE, "choose other seeds: roundings may decide this one"
            tokens.append(token)
        found[name] = tokens
    return found


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Target:
    return Target(tiny_llama.folder, "float32")


def run(target: Target, truth: dict[str, list[int]], drafter: ScriptedDrafter | None, k: int, **shape: Any) -> Harness:
    harness = Harness(target, k=k, drafter=drafter, **shape)
    answers = harness.run([request(name, prompt, COUNT, **options(name)) for name, prompt in prompts().items()])
    for name, prompt in prompts().items():
        assert answers[name].tokens == truth[name][len(prompt) :], options(name)
    return harness


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_sampling(target: Target, truth: dict[str, list[int]], shape: str) -> None:
    run(target, truth, None, 0, **SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["right", "wrong", "partly right", "faulty"])
@pytest.mark.parametrize("k", [3, 7])
def test_same_ids_whatever_is_drafted(
    target: Target, truth: dict[str, list[int]], k: int, kind: str, shape: str
) -> None:
    drafter = {
        "right": lambda: ScriptedDrafter(drafters.oracle(truth)),
        "wrong": lambda: ScriptedDrafter(drafters.wrong(truth, VOCAB)),
        "partly right": lambda: ScriptedDrafter(drafters.partly(truth, VOCAB, k, 0.8)),
        "faulty": lambda: FaultyDrafter(drafters.partly(truth, VOCAB, k, 0.9), k),
    }[kind]()
    patience = {"draft_deadline_seconds": 0.002} if kind == "faulty" else {}
    stats = run(target, truth, drafter, k, **SHAPES[shape], **patience).engine.load().stats
    assert stats.verified > 0
    if kind == "right":
        assert stats.accepted == stats.verified


def test_a_later_attempt_draws_the_same(target: Target, truth: dict[str, list[int]]) -> None:
    starts = {name: truth[name][len(prompt) :][: 1 + int(name) % 15] for name, prompt in prompts().items()}
    work = [
        request(name, prompt, COUNT, committed=starts[name], attempt=2, **options(name))
        for name, prompt in prompts().items()
    ]
    answers = Harness(target, k=5, drafter=ScriptedDrafter(drafters.partly(truth, VOCAB, 3, 0.7))).run(work)
    for name, prompt in prompts().items():
        assert starts[name] + answers[name].tokens == truth[name][len(prompt) :]


def test_the_seed_matters(target: Target, truth: dict[str, list[int]]) -> None:
    """Other seeds give other texts where there is anything to draw."""
    work = [request(n, p, COUNT, **{**options(n), "seed": options(n)["seed"] + 1}) for n, p in prompts().items()]
    answers = Harness(target).run(work)
    same = [name for name, prompt in prompts().items() if answers[name].tokens == truth[name][len(prompt) :]]
    assert [name for name in same if options(name)["temperature"] > 0.5] == []
    assert [name for name in same if options(name)["temperature"] == 0] == ["5", "11", "17"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """Ten tokens, so that the law of two can be counted."""
    return TinyLlama(tmp_path_factory.mktemp("small"), seed=5, vocab_size=10, hidden_size=32, intermediate_size=32)


def exact_law(llama: TinyLlama, prompt: list[int], temperature: float, top_k: int, top_p: float) -> dict[Any, float]:
    """Probability of each pair of tokens after the prompt."""

    def after(tokens: list[int]) -> dict[int, float]:
        logits = llama.logits(tokens)[-1].numpy()
        ids, law = noise.survivors(logits, temperature, top_k, top_p)
        return dict(zip(ids, law.tolist(), strict=True))

    return {(a, b): p * q for a, p in after(prompt).items() for b, q in after([*prompt, a]).items()}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "count"), [(1.0, 0, 1.0, 8000), (0.6, 0, 1.0, 2000), (1.3, 6, 0.9, 1500)]
)
def test_law_of_two_tokens(small: TinyLlama, temperature: float, top_k: int, top_p: float, count: int) -> None:
    """Over many seeds, with and without drafts, pairs come as often as the model's own law says."""
    prompt = [3, 1, 4, 1, 5]
    law = exact_law(small, prompt, temperature, top_k, top_p)
    assert abs(sum(law.values()) - 1) < 1e-6 and max(law.values()) < 0.5

    def work() -> list[Request]:
        # Three tokens, because the last one is never drafted.
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return [request(str(seed), prompt, 3, seed=seed, **options) for seed in range(count)]

    target, rng = Target(small.folder, "float32"), random.Random(0)
    # A drafter with a favourite, which any wrong rule of acceptance would favour too.
    drafter = ScriptedDrafter(lambda name, tokens, most: [rng.choice([7, rng.randrange(10)]) for _ in range(most)])
    plain = Harness(target, max_num_seqs=64).run(work())
    drafted = Harness(target, k=3, drafter=drafter, max_num_seqs=64)
    pairs = [tuple(plain[str(seed)].tokens[:2]) for seed in range(count)]
    assert chi_square_p(pairs, law) > 1e-3
    assert [tuple(answer.tokens[:2]) for _, answer in by_seed(drafted.run(work()))] == pairs
    assert drafted.engine.load().stats.accepted > 0


def by_seed(answers: dict[str, Answer]) -> list[tuple[str, Answer]]:
    return sorted(answers.items(), key=lambda item: int(item[0]))


def test_chi_square_would_notice() -> None:
    """The test of the law is sharp enough: tokens reused at the second position, or a temperature off by a sixth."""
    rng = np.random.default_rng(0)
    logits = torch.randn(10, generator=torch.Generator().manual_seed(0)).numpy()
    law, off = (np.exp(logits / t) / np.exp(logits / t).sum() for t in (1.0, 1.17))
    product = {(a, b): law[a] * law[b] for a, b in itertools.product(range(10), repeat=2)}
    first, second, warm = (rng.choice(10, 8000, p=p).tolist() for p in (law, law, off))
    assert chi_square_p(zip(first, second, strict=True), product) > 1e-3
    assert chi_square_p(zip(first, first, strict=True), product) < 1e-6
    assert chi_square_p(zip(first, warm, strict=True), product) < 1e-3
