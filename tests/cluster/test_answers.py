"""Several answers on the real engine: with every option, each is what its seed gives alone, whatever is verified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kadence import Client, GenerateResult
from kadence.cluster import LLM
from tests.support.tiny_llama import TinyLlama

PROMPT = [40, 41, 42, 40, 41, 42, 40]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2, "logit_bias": {50: 3.0}},
    {"temperature": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "allowed_token_ids": list(range(2, 60))},
    {"temperature": 1.0, "bad_words": ["the", "a"], "min_tokens": 20, "stop": ["e", "o"], "stop_token_ids": [60, 61]},
]


@pytest.fixture(scope="module")
def client(tiny_llama: TinyLlama) -> Iterator[Client]:
    with LLM(str(tiny_llama.folder), dtype="float32", verifier={"kv_tokens": 8192}) as llm, Client(llm.endpoint) as it:
        yield it


def outcome(result: GenerateResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.stop_match


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("k", [0, 7])
def test_each_answer_is_what_its_seed_gives_alone(client: Client, options: dict[str, Any], k: int) -> None:
    def ask(seed: int, n: int, k: int) -> GenerateResult:
        return client.generate(prompt_token_ids=PROMPT, seed=seed, n=n, max_tokens=40, max_draft_tokens=k, **options)

    together = ask(11, 3, k)
    answers = [together, *together.alternatives]
    alone = [ask(seed, 1, 0) for seed in (11, 12, 13)]
    assert [outcome(answer) for answer in answers] == [outcome(answer) for answer in alone]
    if options["temperature"]:
        assert len({answer.token_ids for answer in answers}) > 1
    for answer, other in zip(answers, alone, strict=True):
        assert len(answer.token_ids) > options.get("min_tokens", 0)
        if "logprobs" in options:
            assert len(answer.logprobs) == len(answer.token_ids)
            for mine, its in zip(answer.logprobs, other.logprobs, strict=True):
                assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
