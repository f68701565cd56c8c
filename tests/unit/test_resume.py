"""Streams cut at every token, against a real server: what arrives is what an uncut stream brings."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kadence import (
    AsyncClient,
    AuthenticationError,
    Chunk,
    Client,
    ConflictError,
    DeadlineExceededError,
    GenerateResult,
    OverloadedError,
    RequestCancelledError,
    RetryConfig,
    UnavailableError,
)
from kadence.testing import FakeGateway, Request

QUICK = RetryConfig(attempts=1, initial_delay=0.005, max_delay=0.05, resume_seconds=5.0)
TEXT = "aé日🙂b"
SEVERAL = (TEXT, "", b"\xf0\x9f ok\xff", "日")  # also ids that spell no character
Open = Callable[..., Client | AsyncClient]


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Opens a client of the kind under test; it is closed at the end."""
    clients: list[Client | AsyncClient] = []

    def open_client(gateway: FakeGateway, **options: Any) -> Client | AsyncClient:
        clients.append(request.param(gateway.endpoint, **{"retry": QUICK, "timeout": 10.0, **options}))
        return clients[-1]

    yield open_client
    for client in clients:
        if isinstance(client, AsyncClient):
            await client.close()
        else:
            client.close()


async def whole(
    client: Client | AsyncClient, prompt: str | None = "p", **options: Any
) -> tuple[list[Chunk], GenerateResult, int]:
    """(chunks, result, resumes) of one generation."""
    if isinstance(client, AsyncClient):
        async with client.stream(prompt, **options) as arriving:
            chunks = [chunk async for chunk in arriving]
            return chunks, arriving.result, arriving.resumes

    def run() -> tuple[list[Chunk], GenerateResult, int]:
        with client.stream(prompt, **options) as stream:
            return list(stream), stream.result, stream.resumes

    return await asyncio.to_thread(run)


def same(cut: GenerateResult, uncut: GenerateResult) -> None:
    """All but what says that it was resumed, and the statistics, which are the last stream's."""
    for one, other in itertools.zip_longest((cut, *cut.alternatives), (uncut, *uncut.alternatives)):
        for name in ("text", "token_ids", "logprobs", "finish_reason", "seed", "index", "prompt_token_ids", "rule"):
            assert getattr(one, name) == getattr(other, name), name


@pytest.mark.parametrize("said", [TEXT, SEVERAL], ids=["one", "several"])
async def test_a_cut_at_every_token(opened: Open, said: Any) -> None:
    with FakeGateway(lambda request: said) as gateway:
        client = opened(gateway)
        options = {"n": 1 if isinstance(said, str) else len(said), "logprobs": 2, "seed": 2**64 - 2}
        _, uncut, none = await whole(client, **options)
        assert none == 0 and uncut.text == TEXT and len(uncut.logprobs) == len(TEXT.encode())
        count = sum(len(one.token_ids) for one in (uncut, *uncut.alternatives))
        for position in range(count + 1):
            gateway.break_off(position)
            chunks, cut, resumes = await whole(client, **options)
            same(cut, uncut)
            assert (resumes, cut.attempt) == ((1, 1) if gateway.requests[-1].resumed else (0, 0))
            for one in (cut, *cut.alternatives):  # what was shown is what the result holds
                mine = [chunk for chunk in chunks if chunk.index == one.index]
                assert "".join(chunk.text for chunk in mine) == one.text
                assert tuple(token for chunk in mine for token in chunk.token_ids) == one.token_ids
                assert tuple(item for chunk in mine for item in chunk.logprobs) == one.logprobs
        assert sum(request.attempt for request in gateway.requests) >= count  # they were really cut


async def test_a_cut_after_each_token(opened: Open) -> None:
    with FakeGateway({"p": TEXT}) as gateway:
        client = opened(gateway)
        _, uncut, _ = await whole(client)
        gateway.break_off(*[1] * 9, *[0] * 3)
        _, cut, resumes = await whole(client, request_id="mine")
    same(cut, uncut)
    assert (resumes, cut.attempt, cut.request_id) == (12, 12, "mine")
    sent = gateway.requests[1:]
    assert [request.request_id for request in sent] == ["mine"] * 13
    assert [len(request.resumed[0]) for request in sent[1:]] == [*range(1, 10), 9, 9, 9]


async def test_refusals_of_a_resumption_are_waited_out(opened: Open) -> None:
    refusals = (UnavailableError("starting"), OverloadedError("full", retry_after=0.3), ConflictError("held"))

    def answer_once(request: Request) -> str:
        for error in refusals:
            gateway.refuse(error)
        return TEXT

    with FakeGateway(answer_once) as gateway:
        gateway.break_off(3)
        begin = time.monotonic()
        _, result, resumes = await whole(opened(gateway))
        assert time.monotonic() - begin >= 0.3
    assert (result.text, resumes) == (TEXT, 1)
    assert [request.attempt for request in gateway.requests] == [0, 1, 1, 1, 2]  # outranks the stream that is held


async def test_a_final_failure_of_a_resumption_names_the_request(opened: Open) -> None:
    with FakeGateway({"p": TEXT}) as gateway:
        client = opened(gateway)
        gateway.break_off(2, error=AuthenticationError("expired"))
        with pytest.raises(AuthenticationError) as caught:
            await whole(client, request_id="mine")
    assert caught.value.request_id == "mine" and len(gateway.requests) == 1


async def test_a_server_that_stays_away(opened: Open) -> None:
    with FakeGateway({"p": TEXT}, delay=0.02) as gateway:
        client = opened(gateway, retry=RetryConfig(initial_delay=0.05, resume_seconds=0.4))
        waiting = asyncio.create_task(whole(client, request_id="mine"))
        while not gateway.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        gateway.close()
        begin = time.monotonic()
        with pytest.raises(UnavailableError) as caught:
            await waiting
        assert 0.2 < time.monotonic() - begin < 5
    assert caught.value.request_id == "mine"


async def test_a_server_that_comes_back(opened: Open) -> None:
    with FakeGateway({"p": TEXT}, delay=0.05) as gateway:
        waiting = asyncio.create_task(whole(opened(gateway)))
        while not gateway.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.15)
    with FakeGateway({"p": TEXT}, port=int(gateway.endpoint.rpartition(":")[2])) as again:
        _, result, resumes = await waiting
    assert (result.text, result.token_ids, resumes) == (TEXT, tuple(TEXT.encode()), 1)
    assert 0 < len(again.requests[0].resumed[0]) < len(TEXT.encode())


async def test_the_deadline_bounds_resumption(opened: Open) -> None:
    with FakeGateway({"p": TEXT}, delay=0.1) as gateway:
        gateway.break_off(1)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await whole(opened(gateway), timeout=0.5)
        assert time.monotonic() - begin < 3


async def test_cancel_ends_the_wait(opened: Open) -> None:
    with FakeGateway({"p": TEXT}) as gateway:
        client = opened(gateway, retry=RetryConfig(initial_delay=4.0, max_delay=4.0, jitter=0.0))
        gateway.break_off(1)
        stream = client.stream("p")
        pending = asyncio.create_task(drain(stream))
        await asyncio.sleep(0.3)
        assert not pending.done()
        begin = time.monotonic()
        stream.cancel()
        with pytest.raises(RequestCancelledError) as caught:
            await asyncio.wait_for(pending, 5)
        assert time.monotonic() - begin < 2
    assert caught.value.request_id == stream.request_id != "" and len(gateway.requests) == 1


async def test_closing_the_client_ends_the_wait(opened: Open) -> None:
    with FakeGateway({"p": TEXT}) as gateway:
        client = opened(gateway, retry=RetryConfig(initial_delay=4.0, max_delay=4.0, jitter=0.0))
        gateway.break_off(1)
        pending = asyncio.create_task(drain(client.stream("p")))
        await asyncio.sleep(0.3)
        if isinstance(client, AsyncClient):
            await client.close()
        else:
            client.close()
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(pending, 2)


async def drain(stream: Any) -> None:
    if hasattr(stream, "__anext__"):
        async for _ in stream:
            pass
    else:
        await asyncio.to_thread(lambda: [None for _ in stream])


async def test_messages_are_not_rendered_again(opened: Open) -> None:
    with FakeGateway({"Hi": TEXT}) as gateway:
        gateway.break_off(2)
        _, result, resumes = await whole(opened(gateway), None, messages=[{"role": "user", "content": "Hi"}])
    assert (result.text, resumes) == (TEXT, 1)
    first, second = gateway.requests
    assert first.messages and not second.messages
    assert second.prompt_token_ids == result.prompt_token_ids


async def test_many_broken_at_once(opened: Open) -> None:
    with FakeGateway({"p": TEXT}, delay=0.002) as gateway:
        client = opened(gateway)
        gateway.break_off(*[3] * 30)
        results = await asyncio.gather(*(whole(client) for _ in range(30)))
    assert {result.text for _, result, _ in results} == {TEXT}
    assert sum(resumes for _, _, resumes in results) == sum(request.attempt > 0 for request in gateway.requests) > 5
