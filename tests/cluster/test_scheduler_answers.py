"""Several answers to one request: each is what its seed gives alone, and they begin, fail and end together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kadence.errors import (
    APIError,
    ConflictError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from services.scheduler import messages
from services.scheduler.dispatch import MAX_MOVES
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier, seeded
from tests.support.scheduling import Cluster, Result, ask, scheduler, settled, until

PROMPT = [5, 6, 7]
LAST = 2**64 - 1


def outcome(result: Result) -> tuple[list[int], str, str]:
    return result.token_ids, result.text, result.reason


async def failures(cluster: Cluster) -> dict[str, float]:
    codes = ("CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "UNAVAILABLE", "RESOURCE_EXHAUSTED")
    found = {code: cluster.metric("kadence_request_failure_total", code=code) for code in codes}
    return {code: count for code, count in found.items() if count}


async def test_each_answer_is_what_its_seed_gives_alone(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.script = seeded
    stop = 2 + (sum(PROMPT) + 7 + 20) % 300  # ends the answer of seed 1 after 21 tokens, that of seed 0 after 28
    options = {"max_tokens": 25, "stop_token_ids": [stop], "ignore_eos": True}
    alone = [await cluster.generate(ask(ids=PROMPT, seed=seed, **options)) for seed in (LAST, 0, 1)]
    assert [result.reason for result in alone] == ["LENGTH", "LENGTH", "STOP"]
    del verifier.submits[:]
    together, seen = await cluster.events(ask(ids=PROMPT, seed=LAST, n=3, request_id="one", **options))
    assert [outcome(result) for result in together] == [outcome(result) for result in alone]
    assert [result.finished.completion_tokens for result in together if result.finished] == [25, 25, 21]
    assert together[0].started is not None and together[0].started.seed == LAST
    # Side by side: every answer has begun before the first one ends.
    first_end = next(i for i, message in enumerate(seen) if message.WhichOneof("event") == "finished")
    assert {m.chunk.index for m in seen[:first_end] if m.WhichOneof("event") == "chunk"} == {0, 1, 2}
    assert [submit.sampling.seed for submit in verifier.submits] == [LAST, 0, 1]
    assert len({submit.stamp.request_id for submit in verifier.submits}) == 3
    assert cluster.metric("kadence_prompt_tokens_total") == 4 * len(PROMPT)  # a request's prompt counts once
    await settled(cluster, verifier)
    assert not verifier.stops


async def test_each_answer_ends_at_its_own_stop_string(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer
) -> None:
    cluster, verifier = pair
    texts = ["hello stop world", "the quick brown fox stop", "no end"]
    verifier.script = lambda submit: tokenizer.encode(texts[submit.sampling.seed])
    results = await cluster.answers(ask(n=3, seed=0, max_tokens=100, stop=["stop"]))
    assert [result.text for result in results] == ["hello ", "the quick brown fox ", "no end"]
    assert [result.finished.stop_match for result in results if result.finished] == ["stop", "stop", ""]
    await settled(cluster, verifier)


async def test_all_or_none_are_admitted(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    with pytest.raises(OverloadedError, match="0 requests wait, at most 4 may and 14 answers are asked for"):
        await cluster.answers(ask(ids=PROMPT, n=14))
    assert cluster.service._dispatcher.in_flight == 0
    task = asyncio.create_task(cluster.answers(ask(ids=PROMPT, n=13, max_tokens=3)))
    await until(lambda: len(verifier.running) == 9)
    assert cluster.service._dispatcher.queued == 4
    with pytest.raises(OverloadedError):
        await cluster.answers(ask(ids=PROMPT))
    verifier.gate.set()
    assert [result.reason for result in await task] == ["LENGTH"] * 13
    await settled(cluster, verifier)


async def test_more_answers_than_ever_fit_are_a_wrong_request(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder, max_queue=1, max_in_flight=2) as cluster:
        with pytest.raises(InvalidRequestError, match=r"sampling.n: 4; 1 to 3"):
            await cluster.answers(ask(ids=PROMPT, n=4))


@pytest.mark.parametrize("queued", [0, 4])
async def test_cancel_frees_all(pair: tuple[Cluster, FakeVerifier], queued: int) -> None:
    cluster, verifier = pair
    verifier.step_seconds = 0.02
    call = cluster.stub.Generate(ask(ids=PROMPT, n=9 + queued, max_tokens=200, ignore_eos=True), timeout=20)
    async for response in call:
        if response.WhichOneof("event") == "chunk":
            break
    assert len(verifier.running) == 9 and cluster.service._dispatcher.queued == queued
    call.cancel()
    await settled(cluster, verifier)
    assert len({stamp.request_id for stamp in verifier.stops}) == 9
    assert await failures(cluster) == {"CANCELLED": 1}


async def test_the_deadline_ends_all(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    with pytest.raises(DeadlineExceededError):
        await cluster.answers(ask(ids=PROMPT, n=3), seconds=0.2)
    await settled(cluster, verifier)
    assert await failures(cluster) == {"DEADLINE_EXCEEDED": 1}


async def test_one_that_fails_ends_all_with_its_error(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.step_seconds = 0.02
    received, errors = [], list[APIError]()
    try:
        async for response in cluster.stub.Generate(
            ask(ids=PROMPT, n=3, max_tokens=200, ignore_eos=True, request_id="one"), timeout=20
        ):
            received.append(response)
            if len(received) == 8:
                verifier.fail(verifier.submits[1].stamp.request_id, "INTERNAL", "a fault")
    except InternalError as error:
        errors.append(error)
    assert [error.message for error in errors] == ["a fault"] and errors[0].request_id == "one"
    assert not any(message.WhichOneof("event") == "finished" for message in received)
    await settled(cluster, verifier)
    assert {stamp.request_id for stamp in verifier.stops} == {verifier.submits[i].stamp.request_id for i in (0, 2)}
    assert await failures(cluster) == {"INTERNAL": 1}


async def test_one_that_fails_frees_the_others_though_nobody_reads(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.per_step = 0
    request = ask(ids=PROMPT, n=3, max_tokens=200, ignore_eos=True)
    generation = await cluster.service._intake.open(messages.ask(request), 20.0)
    await until(lambda: len(verifier.running) == 3)
    verifier.fail(verifier.submits[1].stamp.request_id, "INTERNAL", "a fault")
    await settled(cluster, verifier)
    with pytest.raises(InternalError, match="a fault"):
        async for _ in generation.events():
            pass
    generation.close()
    assert await failures(cluster) == {"INTERNAL": 1}


async def test_one_that_has_moved_too_often_takes_the_others_along(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    task = asyncio.create_task(cluster.answers(ask(ids=PROMPT, n=2, max_tokens=9, ignore_eos=True)))
    await until(lambda: len(verifier.running) == 2)
    verifier.fail(verifier.submits[1].stamp.request_id, "UNAVAILABLE", "not this one")
    await until(lambda: len(verifier.submits) == 3)
    for moves in range(2, MAX_MOVES + 2):  # the other one has moved once less
        streams = verifier.streams
        verifier.hang_up()
        await until(lambda streams=streams: verifier.streams > streams)
        await until(lambda moves=moves: moves > MAX_MOVES or len(verifier.submits) == 1 + 2 * moves)
    with pytest.raises(UnavailableError, match=f"lost {MAX_MOVES + 1} verifiers"):
        await task
    await settled(cluster, verifier)
    assert len(verifier.submits) == 1 + 2 * MAX_MOVES
    assert await failures(cluster) == {"UNAVAILABLE": 1}


async def test_answers_that_no_verifier_takes_fail_once(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.refuse = ("UNAVAILABLE", "not today")
    with pytest.raises(UnavailableError, match="not today"):
        await cluster.answers(ask(ids=PROMPT, n=3))
    await settled(cluster, verifier)
    assert await failures(cluster) == {"UNAVAILABLE": 1}


async def test_answers_go_on_at_another_verifier(tokenizer_folder: Path) -> None:
    async with (
        scheduler(tokenizer_folder, attach_wait_seconds=5) as cluster,
        FakeVerifier(cluster.inner, script=seeded, step_seconds=0.02, cached=2) as a,
    ):
        await until(lambda: a.streams)
        request = ask(ids=PROMPT, n=3, seed=5, max_tokens=60, ignore_eos=True)
        task = asyncio.create_task(cluster.answers(request))
        await until(lambda: a._step >= 4)
        await a.kill()
        async with FakeVerifier(cluster.inner, "verifier-b", script=seeded, cached=3) as b:
            results = await task
            assert [len(submit.committed_token_ids) > 0 for submit in b.submits] == [True] * 3
            assert [submit.stamp.attempt for submit in b.submits] == [1] * 3
            assert [r.token_ids for r in results] == [list(seeded(submit)) for submit in a.submits]
            # Counted once, however many verifiers an answer has seen.
            assert [r.finished.stats.cached_tokens for r in results if r.finished] == [2, 2, 2]
            await settled(cluster, b)


async def test_ids_within_the_cluster_are_like_no_clients(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    names = ["one", "one/1", "one 1", "one1", "x" * 128]
    tasks = [asyncio.create_task(cluster.answers(ask(ids=PROMPT, n=2, max_tokens=3, request_id=n))) for n in names]
    await until(lambda: cluster.service._dispatcher.in_flight == 10)
    verifier.gate.set()
    assert [r.reason for results in await asyncio.gather(*tasks) for r in results] == ["LENGTH"] * 10
    assert len({submit.stamp.request_id for submit in verifier.submits}) == 10
    for inner in {submit.stamp.request_id for submit in verifier.submits} - set(names):
        with pytest.raises(InvalidRequestError, match="unprintable"):
            await cluster.answers(ask(ids=PROMPT, request_id=inner[-64:]))


async def test_an_id_is_in_use_until_the_last_answer_ends(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.script = lambda submit: [tiny_model.END] if submit.sampling.seed == 0 else [50] * 9
    finished = asyncio.Event()

    async def read() -> None:
        async for response in cluster.stub.Generate(ask(ids=PROMPT, n=2, seed=0, request_id="one"), timeout=20):
            if response.WhichOneof("event") == "finished" and response.finished.index == 0:
                finished.set()

    verifier.per_step = 0  # the first token comes, and no more
    task = asyncio.create_task(read())
    await finished.wait()
    with pytest.raises(ConflictError, match="'one' is in use"):
        await cluster.answers(ask(ids=PROMPT, request_id="one"))
    verifier.per_step = 3
    await task
    assert (await cluster.answers(ask(ids=PROMPT, seed=0, request_id="one")))[0].reason == "STOP"
