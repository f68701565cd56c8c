"""A stream that broke goes on where its client stands, and the text is as if it had not broken."""

from __future__ import annotations

import asyncio

import pytest

from kadence.errors import InvalidRequestError, RequestCancelledError
from kadence.v1 import inference_pb2
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, ask, says, settled, until

PROMPT = [5, 6, 7]


def resume(first: inference_pb2.Started, ids: list[int] | None = None, *more: list[int]) -> inference_pb2.Resume:
    others = [inference_pb2.ResumedAnswer(token_ids=held) for held in more]
    return inference_pb2.Resume(token_ids=ids, seed=first.seed, attempt=first.attempt, rule=first.rule, more=others)


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


async def test_an_attempt_that_leaves_no_room_to_count_on(pair: tuple[Cluster, FakeVerifier]) -> None:
    """The numbers between scheduler and verifier have 32 bits, and a takeover or a lost verifier adds to them."""
    cluster, verifier = pair
    says(verifier, [50, 51])
    for attempt in (2**32 - 1, 2**32 - 2):
        again = inference_pb2.Resume(seed=3, attempt=attempt)
        with pytest.raises(InvalidRequestError, match=r"resume\.attempt"):
            await cluster.generate(ask(ids=PROMPT, max_tokens=2, resume=again))
    await settled(cluster, verifier)


@pytest.mark.parametrize("stop", [[], ["over the"]])
async def test_resume_of_several_answers_at_any_point(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer, stop: list[str]
) -> None:
    """Wherever each answer stands when the stream breaks, the second stream brings the rest of each."""
    cluster, verifier = pair
    verifier.per_step, verifier.step_seconds = 2, 0.0
    texts = ["日本 over, 🙂 over the", "over over the lazy dog", "the quick"]
    answers = [[*tokenizer.encode(text), tiny_model.END] for text in texts]
    verifier.script = lambda submit: answers[submit.sampling.seed]
    options = {"n": 3, "max_tokens": 100, "stop": stop}
    whole = await cluster.answers(ask(seed=0, **options))
    started = whole[0].started
    assert started is not None
    longest = max(len(result.token_ids) for result in whole)
    for step in range(longest + 1):
        # The answers stand at different points; from the last step on all have ended.
        counts = [min(len(r.token_ids), max(0, step - 2 * i)) for i, r in enumerate(whole)]
        if step == longest:
            counts = [len(r.token_ids) for r in whole]
        held = [result.token_ids[:count] for result, count in zip(whole, counts, strict=True)]
        while held and not held[-1]:
            held.pop()  # nothing received of the last ones: a client need not name them
        del verifier.submits[:]
        again = await cluster.answers(ask(resume=resume(started, *held), **options))
        for before, count, after in zip(whole, counts, again, strict=True):
            assert before.token_ids[:count] + after.token_ids == before.token_ids
            assert after.reason == before.reason and after.finished is not None and before.finished is not None
            assert after.finished.completion_tokens == before.finished.completion_tokens
            assert after.finished.stop_match == before.finished.stop_match
            assert before.text.endswith(after.text)
        unfinished = [i for i, (r, count) in enumerate(zip(whole, counts, strict=True)) if count < len(r.token_ids)]
        assert [submit.sampling.seed for submit in verifier.submits] == unfinished
        assert all(submit.stamp.attempt == 1 for submit in verifier.submits)
    await settled(cluster, verifier)


async def test_a_stream_that_takes_over_is_newer_than_every_move(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    request = ask(ids=PROMPT, n=2, max_tokens=9, request_id="one", seed=3, ignore_eos=True)
    old = asyncio.create_task(cluster.answers(request))
    await until(lambda: len(verifier.running) == 2)
    verifier.fail(verifier.submits[1].stamp.request_id, "UNAVAILABLE", "not this one")
    await until(lambda: [submit.stamp.attempt for submit in verifier.submits] == [0, 0, 1])
    request.resume.CopyFrom(inference_pb2.Resume(seed=3, attempt=0))
    new = asyncio.create_task(cluster.answers(request))
    with pytest.raises(RequestCancelledError, match="resumed"):
        await old
    await until(lambda: [submit.stamp.attempt for submit in verifier.submits[3:]] == [2, 2])
    verifier.gate.set()
    results = await new
    assert [len(result.token_ids) for result in results] == [9, 9]
    assert results[0].started is not None and results[0].started.attempt == 2
    await settled(cluster, verifier)


async def test_resume_takes_over_all_answers(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    request = ask(ids=PROMPT, n=3, max_tokens=9, request_id="one", seed=3, ignore_eos=True)
    old = asyncio.create_task(cluster.answers(request))
    await until(lambda: len(verifier.running) == 3)
    request.resume.CopyFrom(inference_pb2.Resume(seed=3, attempt=0))
    new = asyncio.create_task(cluster.answers(request))
    with pytest.raises(RequestCancelledError, match="resumed"):
        await old
    await until(lambda: {attempt for _, attempt in verifier.running} == {1})
    verifier.gate.set()
    assert [len(result.token_ids) for result in await new] == [9] * 3
    await settled(cluster, verifier)
    assert sorted(stamp.attempt for stamp in verifier.stops) == [0] * 3
    assert cluster.metric("kadence_request_failure_total", code="CANCELLED") == 1
