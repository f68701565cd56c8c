"""Every request has exactly one end: cancelled, late, refused, drained or answered, and nobody waits for another."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kadence.errors import (
    ConflictError,
    DeadlineExceededError,
    OverloadedError,
    UnavailableError,
)
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, ask, scheduler, settled, until

PROMPT = [5, 6, 7]


async def test_cancel_reaches_the_verifier(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.step_seconds = 0.02
    call = cluster.stub.Generate(ask(ids=PROMPT, max_tokens=200, ignore_eos=True), timeout=20)
    async for response in call:
        if response.WhichOneof("event") == "chunk":
            break
    call.cancel()
    await settled(cluster, verifier)
    assert len(verifier.stops) == 1
    assert cluster.metric("kadence_request_failure_total", code="CANCELLED") == 1


async def test_cancel_in_the_queue(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    running = [asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=3))) for _ in range(9)]
    await until(lambda: len(verifier.running) == 9)
    queued = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=3)))
    await until(lambda: cluster.service._dispatcher.queued == 1)
    queued.cancel()
    await until(lambda: cluster.service._dispatcher.queued == 0)
    verifier.gate.set()
    assert [result.reason for result in await asyncio.gather(*running)] == ["LENGTH"] * 9
    await settled(cluster, verifier)
    assert not verifier.stops and len(verifier.submits) == 9


async def test_deadline(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    with pytest.raises(DeadlineExceededError):
        await cluster.generate(ask(ids=PROMPT), seconds=0.2)
    await until(lambda: verifier.stops)
    await until(lambda: cluster.metric("kadence_request_failure_total", code="DEADLINE_EXCEEDED") == 1)
    assert cluster.metric("kadence_request_failure_total", code="CANCELLED") == 0


async def test_default_deadline(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder, default_timeout_seconds=0.2, attach_wait_seconds=10) as cluster:
        with pytest.raises(DeadlineExceededError, match="time was up"):
            async for _ in cluster.stub.Generate(ask(ids=PROMPT)):
                pass


async def test_full_queue_is_refused_with_a_delay(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    tasks = [asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=3))) for _ in range(13)]
    await until(lambda: cluster.service._dispatcher.queued == 4)
    await until(lambda: len(verifier.running) == 9)  # capacity 8 and one that waits there
    status = await cluster.status()
    assert (status.requests_in_flight, status.requests_queued) == (13, 4)
    with pytest.raises(OverloadedError, match="4 requests wait, at most 4 may") as caught:
        await cluster.generate(ask(ids=PROMPT))
    assert 0.5 <= caught.value.retry_after <= 30
    verifier.gate.set()
    assert {result.reason for result in await asyncio.gather(*tasks)} == {"LENGTH"}
    await settled(cluster, verifier)


async def test_no_verifier(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder, attach_wait_seconds=0.3) as cluster:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="no verifier is attached"):
            await cluster.generate(ask(ids=PROMPT))
        assert 0.25 < time.monotonic() - began < 2.0


async def test_a_verifier_that_comes_in_time(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder, attach_wait_seconds=5) as cluster:
        task = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=4)))
        await until(lambda: cluster.service._dispatcher.queued)
        async with FakeVerifier(cluster.inner):
            assert (await task).reason == "LENGTH"


async def test_a_request_id_in_use(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    verifier.gate.clear()
    task = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=3, request_id="one")))
    await until(lambda: verifier.running)
    with pytest.raises(ConflictError, match="'one' is in use"):
        await cluster.generate(ask(ids=PROMPT, request_id="one"))
    verifier.gate.set()
    assert (await task).reason == "LENGTH"
    assert (await cluster.generate(ask(ids=PROMPT, max_tokens=3, request_id="one"))).reason == "LENGTH"


async def test_drain_finishes_what_runs_and_refuses_the_rest(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder) as cluster, FakeVerifier(cluster.inner) as verifier:
        await until(lambda: verifier.streams)
        verifier.gate.clear()
        quick = asyncio.create_task(cluster.generate(ask(ids=PROMPT, max_tokens=4)))
        await until(lambda: verifier.running)
        drain = asyncio.create_task(cluster.service.drain(5.0))
        await until(lambda: cluster.service._draining)
        with pytest.raises(UnavailableError, match="shutting down"):
            await cluster.generate(ask(ids=PROMPT))
        verifier.gate.set()
        assert (await quick).reason == "LENGTH"
        await asyncio.wait_for(drain, 4.0)


async def test_drain_ends_what_does_not_finish(tokenizer_folder: Path) -> None:
    async with scheduler(tokenizer_folder) as cluster, FakeVerifier(cluster.inner) as verifier:
        await until(lambda: verifier.streams)
        verifier.gate.clear()
        tasks = [asyncio.create_task(cluster.generate(ask(ids=PROMPT))) for _ in range(12)]
        await until(lambda: cluster.service._dispatcher.in_flight == 12)
        await asyncio.wait_for(cluster.service.drain(0.2), 4.0)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, UnavailableError) and "shutting down" in result.message


async def test_a_slow_reader_holds_nobody_up(pair: tuple[Cluster, FakeVerifier]) -> None:
    cluster, verifier = pair
    slow = cluster.stub.Generate(ask(ids=PROMPT, max_tokens=200, ignore_eos=True), timeout=20)
    await anext(slow)
    began = time.monotonic()
    results = await asyncio.gather(*(cluster.generate(ask(ids=PROMPT, max_tokens=50)) for _ in range(4)))
    assert all(len(result.token_ids) == 50 for result in results) and time.monotonic() - began < 5
    await until(lambda: not verifier.running)  # its verifier has finished long before it reads on
    tokens = [token async for response in slow for token in response.chunk.token_ids]
    assert len(tokens) == 200


async def test_chunks_are_joined_when_there_are_many_streams(tokenizer_folder: Path) -> None:
    async with (
        scheduler(tokenizer_folder, max_chunks_per_second=20) as cluster,
        FakeVerifier(cluster.inner, per_step=1) as verifier,
    ):
        await until(lambda: verifier.streams)
        results = await asyncio.gather(
            *(cluster.generate(ask(ids=PROMPT, max_tokens=100, ignore_eos=True)) for _ in range(4))
        )
        assert all(len(result.token_ids) == 100 and result.chunks <= 20 for result in results)
