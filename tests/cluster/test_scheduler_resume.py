"""A stream that broke goes on where its client stands, and the text is as if it had not broken."""

from __future__ import annotations

import asyncio

import pytest

from kadence.errors import (
    RequestCancelledError,
)
from kadence.v1 import inference_pb2
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, ask, says, settled, until

PROMPT = [5, 6, 7]


def resume(first: inference_pb2.Started, ids: list[int]) -> inference_pb2.Resume:
    return inference_pb2.Resume(token_ids=ids, seed=first.seed, attempt=first.attempt, rule=first.rule)


@pytest.mark.parametrize("stop", [[], ["over the"]])
async def test_resume_at_every_token(pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer, stop: list[str]) -> None:
    """Whatever a client holds when its stream breaks, the second stream's text completes the first one's."""
    cluster, verifier = pair
    verifier.per_step, verifier.step_seconds = 1, 0.0
    ids = [*tokenizer.encode("日本 over, 🙂 over"), tiny_model.END]
    says(verifier, ids)
    whole = await cluster.generate(ask(max_tokens=100, stop=stop))
    assert whole.token_ids == ids and whole.started is not None
    for held in range(1, len(ids) + 1):
        first = ""
        stream = cluster.stub.Generate(ask(max_tokens=held, stop=stop, ignore_eos=True), timeout=10)
        async for response in stream:
            if response.WhichOneof("event") == "chunk":
                first += response.chunk.text
        again = await cluster.generate(ask(max_tokens=100, stop=stop, resume=resume(whole.started, ids[:held])))
        assert again.started is not None and again.finished is not None
        assert (again.started.attempt, again.started.seed) == (1, whole.started.seed)
        assert again.token_ids == ids[held:] and again.reason == "STOP"
        assert again.finished.completion_tokens == len(ids)
        if held < len(ids):  # with the end of sequence ignored, that token was plain text to the first stream
            assert first + again.text == whole.text
            assert list(verifier.submits[-1].committed_token_ids) == ids[:held]
            assert verifier.submits[-1].stamp.attempt == 1
    await settled(cluster, verifier)


async def test_resume_of_a_complete_answer_asks_no_verifier(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer
) -> None:
    cluster, verifier = pair
    for ids, options, reason, match in (
        ([50, 51], {"max_tokens": 2}, "LENGTH", ""),
        ([50, tiny_model.END], {"max_tokens": 9}, "STOP", "<|end|>"),
        (tokenizer.encode("a stop"), {"max_tokens": 9, "stop": ["stop"]}, "STOP", "stop"),
    ):
        result = await cluster.generate(ask(resume=inference_pb2.Resume(token_ids=ids, seed=4), **options))
        assert result.reason == reason and result.finished is not None
        assert result.finished.stop_match == match and not result.token_ids
        assert result.started is not None and result.started.seed == 4
    assert not verifier.submits
    await settled(cluster, verifier)


async def test_resume_takes_over_from_a_stream_that_has_not_noticed(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    old = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=9, request_id="one", seed=3)))
    await until(lambda: verifier.running)
    again = inference_pb2.Resume(token_ids=[], seed=3, attempt=0)
    new = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=9, request_id="one", resume=again)))
    with pytest.raises(RequestCancelledError, match="resumed"):
        await old
    await until(lambda: ("one", 1) in verifier.running)
    verifier.gate.set()
    assert len((await new).token_ids) == 9
    await settled(cluster, verifier)
    assert [(stamp.request_id, stamp.attempt) for stamp in verifier.stops] == [("one", 0)]
