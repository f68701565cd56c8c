"""Requests through a real scheduler and scripted verifiers: what goes in, what comes out, what is refused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kadence.errors import (
    InvalidRequestError,
)
from kadence.v1 import inference_pb2, types_pb2
from services.scheduler.request import Rule
from services.scheduler.session import FinishReason
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, ask, says, scheduler, settled, until

PROMPT = [5, 6, 7]


async def test_an_answer(pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer) -> None:
    cluster, verifier = pair
    ids = [*tokenizer.encode("hello, 日本語 🙂 world"), tiny_model.END]
    says(verifier, ids)
    result = await cluster.generate(ask("the fox", max_tokens=100))
    assert result.started is not None and result.finished is not None
    assert list(result.started.prompt_token_ids) == tokenizer.encode("the fox")
    assert (result.started.model, result.started.attempt, result.started.rule) == ("tiny", 0, types_pb2.RULE_MATCH)
    assert result.started.request_id
    assert result.token_ids == ids and result.text == "hello, 日本語 🙂 world"
    assert result.reason == "STOP" and result.finished.stop_match == "<|end|>"
    assert result.finished.prompt_tokens == len(result.started.prompt_token_ids)
    assert result.finished.completion_tokens == len(ids)
    stats = result.finished.stats
    assert stats.committed == len(ids) - 1 and stats.steps == stats.k_hist[5] == -(-(len(ids) - 1) // 3)
    assert stats.drafted == 7 * stats.steps and stats.verified == 5 * stats.steps
    assert stats.accepted == stats.committed - stats.steps
    sampling = verifier.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.0, 1.0, 0, 100)
    assert list(sampling.stop_token_ids) == [tiny_model.END] and sampling.rule == types_pb2.RULE_MATCH
    assert not sampling.HasField("max_draft_tokens") and sampling.priority == 1.0
    await settled(cluster, verifier)
    assert not verifier.stops


async def test_options_reach_the_verifier(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    options = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 2**64 - 1, "max_draft_tokens": 0, "priority": 2.0}
    result = await cluster.generate(
        ask(ids=PROMPT, max_tokens=5, ignore_eos=True, stop_token_ids=[9, 9], request_id="mine", **options)
    )
    assert result.started is not None
    assert result.started.request_id == "mine" and result.started.seed == 2**64 - 1
    assert list(result.started.prompt_token_ids) == PROMPT
    submit = verifier.submits[0]
    assert submit.stamp.request_id == "mine" and list(submit.prompt_token_ids) == PROMPT
    assert {name: getattr(submit.sampling, name) for name in options} == options
    assert submit.sampling.HasField("max_draft_tokens")
    assert list(submit.sampling.stop_token_ids) == [9]
    assert result.reason == "LENGTH" and len(result.token_ids) == 5


async def test_messages_and_clipped_length(pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer) -> None:
    cluster, verifier = pair
    message = types_pb2.ChatMessage(role="user", content="hi")
    result = await cluster.generate(ask(messages=[message], ignore_eos=True))
    assert result.started is not None
    prompt = tokenizer.encode_chat([("user", "hi")])
    assert list(result.started.prompt_token_ids) == prompt
    assert verifier.submits[0].sampling.max_tokens == tiny_model.CONTEXT - len(prompt) == len(result.token_ids)


async def test_a_long_prompt_goes_through_the_thread(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder) as cluster:
        with pytest.raises(InvalidRequestError, match=r"prompt: has \d+ tokens; at most 255"):
            await cluster.generate(ask("hello " * 500))


async def test_random_seeds_differ(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    for _ in range(2):
        await cluster.generate(ask(ids=PROMPT, max_tokens=1, temperature=1.0))
    assert verifier.submits[0].sampling.seed != verifier.submits[1].sampling.seed


@pytest.mark.parametrize("per_step", [1, 4, 50])
async def test_stop_string_across_tokens(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer, per_step: int
) -> None:
    cluster, verifier = pair
    verifier.per_step = per_step
    ids = tokenizer.encode("hello sto, stop here and there")
    says(verifier, ids * 5)
    result = await cluster.generate(ask(max_tokens=100, stop=["stop he", "zebra"]))
    assert result.text == "hello sto, " and result.reason == "STOP"
    assert result.finished is not None and result.finished.stop_match == "stop he"
    decoded = tokenizer.decode(result.token_ids)
    assert "stop he" in decoded and "stop he" not in tokenizer.decode(result.token_ids[:-1])
    assert result.finished.completion_tokens == len(result.token_ids)
    assert result.finished.stats.committed == len(result.token_ids) - 1
    await settled(cluster, verifier)
    assert [stamp.request_id for stamp in verifier.stops] == [verifier.submits[0].stamp.request_id]


async def test_held_back_text_comes_with_the_end(pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer) -> None:
    cluster, verifier = pair
    says(verifier, tokenizer.encode("hello sto"))
    result = await cluster.generate(ask(max_tokens=100, stop=["stop"]))
    assert result.text == "hello sto" and result.finished is not None
    assert result.finished.text == "sto" and result.reason == "LENGTH" and not result.finished.stop_match
    half = tokenizer.encode("a🙂")[:-1]
    says(verifier, half)
    result = await cluster.generate(ask(max_tokens=100))
    assert result.text == tokenizer.decode(half) == "a\ufffd"


async def test_a_requested_stop_id_is_no_text(pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer) -> None:
    cluster, verifier = pair
    ids = tokenizer.encode("hello.")
    says(verifier, [*ids, 99, 99])
    result = await cluster.generate(ask(max_tokens=100, stop_token_ids=[ids[-1]]))
    assert result.token_ids == ids and result.text == "hello"
    assert result.finished is not None and result.finished.stop_match == "."


async def test_bad_requests_queue_nothing(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    with pytest.raises(InvalidRequestError) as caught:
        await cluster.generate(ask("x", temperature=float("nan"), top_p=7.0, max_tokens=1000, stop=["x"] * 1000))
    error = caught.value
    assert error.code == "INVALID_ARGUMENT"
    fields = [violation.field for violation in error.violations]
    assert fields == ["sampling.temperature", "sampling.top_p", "sampling.stop", "sampling.max_tokens"]
    assert "1000" in error.violations[3].description and str(tiny_model.CONTEXT) in error.violations[3].description
    bad = [
        ask(None),
        ask(""),
        ask(model="other"),
        ask(rule=9),
        ask(ids=[tiny_model.VOCAB_SIZE]),
        ask(ids=[1] * tiny_model.CONTEXT),
        inference_pb2.GenerateRequest(prompt="x", prompt_token_ids=[1]),
        ask(messages=[types_pb2.ChatMessage(role="robot", content="x")]),
    ]
    for request in bad:
        with pytest.raises(InvalidRequestError) as caught:
            await cluster.generate(request)
        assert len(caught.value.violations) == 1, caught.value
    assert not verifier.submits and cluster.service._dispatcher.in_flight == 0
    assert cluster.metric("kadence_request_failure_total", code="INVALID_ARGUMENT") == 1 + len(bad)


async def test_a_ten_megabyte_prompt_is_refused_fast(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="prompt: 10000000 bytes; at most"):
        await cluster.generate(ask("x" * 10_000_000))
    assert time.monotonic() - began < 2.0 and not verifier.submits


async def test_the_verifiers_context_counts(tokenizer_folder: Path) -> None:
    async with (
        scheduler(tokenizer_folder) as cluster,
        FakeVerifier(cluster.inner, max_model_len=50),
    ):
        await until(lambda: cluster.service._fleet.live("verifier"))
        with pytest.raises(InvalidRequestError, match="at most 50, the context"):
            await cluster.generate(ask(ids=PROMPT, max_tokens=48))
        models = await cluster.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
        assert [(m.name, m.max_model_len, m.vocab_size, m.drafter_kind) for m in models.models] == [
            ("tiny", 50, tiny_model.VOCAB_SIZE, "none")
        ]


async def test_metrics(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    await cluster.generate(ask(ids=PROMPT, max_tokens=10, ignore_eos=True))
    says(verifier, [50, tiny_model.END])
    await cluster.generate(ask(ids=PROMPT))
    assert cluster.metric("kadence_request_success_total", finished_reason="length") == 1
    assert cluster.metric("kadence_request_success_total", finished_reason="stop") == 1
    assert cluster.metric("kadence_prompt_tokens_total") == 6
    assert cluster.metric("kadence_generation_tokens_total") == 12
    assert cluster.metric("kadence_time_to_first_token_seconds_count") == 2
    assert cluster.metric("kadence_inter_token_latency_seconds_count") == 4
    assert cluster.metric("kadence_e2e_request_latency_seconds_count") == 2
    assert cluster.metric("kadence_request_queue_time_seconds_count") == 2
    assert cluster.metric("kadence_policy_epoch") == 1
    assert cluster.metric("kadence_replicas", kind="verifier", state="ready") == 1
    verifier.gate.clear()
    task = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=3)))
    await until(lambda: cluster.metric("kadence_num_requests_running") == 1)
    assert cluster.metric("kadence_num_requests_waiting") == 0
    verifier.gate.set()
    await task


def test_plain_enums_have_the_contracts_numbers() -> None:
    for reason in FinishReason:
        assert types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") == reason
    for rule in Rule:
        assert types_pb2.Rule.Value(f"RULE_{rule.name}") == rule
