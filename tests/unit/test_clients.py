"""Both clients against a real gRPC server that answers by script; every test runs on each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import kadence
from kadence import (
    APIError,
    AsyncClient,
    AsyncStream,
    Chunk,
    Client,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    RetryConfig,
    Stream,
    UnavailableError,
)
from kadence.errors import BY_CODE
from tests.support.scripted import HELLO, Servicer, chunk, finished, serving, started

QUICK = RetryConfig(attempts=4, initial_delay=0.02, jitter=0.0)
Opened = Client | AsyncClient
Open = Callable[..., Opened]


async def wait(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a method of either client; the synchronous one runs in a thread."""
    if isinstance(getattr(call, "__self__", None), AsyncClient | AsyncStream):
        found = call(*args, **options)
        return await found if isinstance(found, Awaitable) else found
    return await asyncio.to_thread(call, *args, **options)


async def step(stream: Stream | AsyncStream) -> Chunk:
    if isinstance(stream, AsyncStream):
        return await anext(stream)
    found = await asyncio.to_thread(next, stream, None)  # StopIteration cannot leave a thread
    if found is None:
        raise StopAsyncIteration
    return found


async def collect(stream: Stream | AsyncStream) -> list[Chunk]:
    found = []
    while True:
        try:
            found.append(await step(stream))
        except StopAsyncIteration:
            return found


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "async"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Opens a client of the kind under test; it is closed at the end."""
    clients: list[Opened] = []

    def open_client(endpoint: str, **options: Any) -> Opened:
        clients.append(request.param(endpoint, **{"retry": QUICK, "timeout": 10.0, **options}))
        return clients[-1]

    yield open_client
    for client in clients:
        await wait(client.close)


async def test_generate_gives_a_typed_result(opened: Open) -> None:
    servicer = Servicer()
    async with serving(servicer) as address:
        client = opened(address, metadata={"tenant": "a", "zone": "x"})
        result = await wait(
            client.generate, "Hi", temperature=0.5, stop="END", request_id="r-1", metadata={"zone": "y"}
        )
    assert isinstance(result, kadence.GenerateResult)
    assert (result.text, result.token_ids, result.finish_reason) == ("Hello you", (10, 11, 12, 13), "stop")
    (request,) = servicer.requests
    assert (request.prompt, request.request_id, request.sampling.temperature) == ("Hi", "r-1", 0.5)
    assert list(request.sampling.stop) == ["END"]
    assert servicer.metadata[0].items() >= {"tenant": "a", "zone": "y"}.items()


async def test_chunks_add_up_to_the_result(opened: Open) -> None:
    async with serving(Servicer()) as address:
        stream = await wait(opened(address).stream, "Hi")
        with pytest.raises(RuntimeError):
            _ = stream.result
        chunks = await collect(stream)
    assert chunks[0] == Chunk((10, 11), "Hel")
    assert "".join(part.text for part in chunks) == stream.result.text
    assert tuple(index for part in chunks for index in part.token_ids) == stream.result.token_ids
    stream.cancel()  # after the end: nothing
    assert await collect(stream) == [] and stream.result.text == "Hello you"


async def test_retries_before_the_first_message(opened: Open) -> None:
    servicer = Servicer([[UnavailableError("starting")], [OverloadedError("full", retry_after=0.2)], HELLO])
    async with serving(servicer) as address:
        begin = time.monotonic()
        result = await wait(opened(address).generate, "Hi")
        assert time.monotonic() - begin >= 0.2
    assert result.text == "Hello you" and len(servicer.requests) == 3


async def test_without_resume_a_broken_stream_is_an_error(opened: Open) -> None:
    servicer = Servicer([[started("r-5"), UnavailableError("gone")], HELLO])
    async with serving(servicer) as address:
        with pytest.raises(UnavailableError, match="gone") as caught:
            await wait(opened(address, retry=RetryConfig(resume_seconds=0)).generate, "Hi")
    assert caught.value.request_id == "r-5" and len(servicer.requests) == 1


async def test_retries_end(opened: Open) -> None:
    servicer = Servicer([[UnavailableError("down")]])
    async with serving(servicer) as address:
        with pytest.raises(UnavailableError, match="down"):
            await wait(opened(address).generate, "Hi")
        assert len(servicer.requests) == QUICK.attempts
        with pytest.raises(UnavailableError):
            await wait(opened(address, retry=RetryConfig(attempts=1)).generate, "Hi")
    assert len(servicer.requests) == QUICK.attempts + 1


async def test_a_server_that_comes_up_late_is_found(opened: Open) -> None:
    async with serving(Servicer()) as address:
        pass
    client = opened(address, retry=RetryConfig(attempts=50, initial_delay=0.05, multiplier=1.0))
    waiting = asyncio.create_task(wait(client.generate, "Hi"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    async with serving(Servicer(), port=int(address.rpartition(":")[2])):
        assert (await waiting).text == "Hello you"


async def test_every_status_is_mapped(opened: Open) -> None:
    errors = []
    for code, kind in BY_CODE.items():
        error = kind(f"about {code}")
        error.code = code
        errors.append(error)
    async with serving(Servicer([[error] for error in errors])) as address:
        client = opened(address, retry=RetryConfig(attempts=1))
        for error in errors:
            with pytest.raises(APIError) as caught:
                await wait(client.generate, "Hi")
            assert (type(caught.value), caught.value.code) == (type(error), error.code)
            assert caught.value.message == error.message


async def test_violations_arrive(opened: Open) -> None:
    async with serving(Servicer([[InvalidRequestError.of("sampling.top_p", "2.0 is outside (0, 1]")]])) as address:
        with pytest.raises(InvalidRequestError) as caught:
            await wait(opened(address).generate, "Hi")
    assert [violation.field for violation in caught.value.violations] == ["sampling.top_p"]


async def test_wrong_types_do_not_reach_the_server(opened: Open) -> None:
    servicer = Servicer()
    async with serving(servicer) as address:
        client = opened(address)
        for options in ({"temperature": "hot"}, {"timeout": 0}, {"metadata": {"A": "b"}}):
            with pytest.raises(InvalidRequestError):
                await wait(client.generate, "Hi", **options)
    assert servicer.requests == []


async def test_the_deadline_ends_a_request(opened: Open) -> None:
    servicer = Servicer([[started(), chunk("a", 1), 30.0]])
    async with serving(servicer) as address:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceededError):
            await wait(opened(address).generate, "Hi", timeout=0.3)
        assert time.monotonic() - begin < 3
        await asyncio.wait_for(servicer.cancelled.wait(), 5)


async def test_cancel_reaches_the_server(opened: Open) -> None:
    servicer = Servicer([[started(), chunk("a", 1), 30.0]])
    async with serving(servicer) as address:
        stream = await wait(opened(address).stream, "Hi")
        assert (await step(stream)).text == "a"
        pending = asyncio.create_task(step(stream))
        await asyncio.sleep(0.05)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(pending, 5)
        await asyncio.wait_for(servicer.cancelled.wait(), 5)
        with pytest.raises(RequestCancelledError):
            await step(stream)


async def test_leaving_the_block_early_cancels(opened: Open) -> None:
    servicer = Servicer([[started(), chunk("a", 1), 30.0]])
    async with serving(servicer) as address:
        stream = await wait(opened(address).stream, "Hi")
        if isinstance(stream, AsyncStream):
            async with stream:
                await step(stream)
        else:
            with stream:
                await step(stream)
        await asyncio.wait_for(servicer.cancelled.wait(), 5)


async def test_cancel_ends_the_wait_for_a_retry(opened: Open) -> None:
    servicer = Servicer([[OverloadedError("full", retry_after=4.0)], HELLO])
    async with serving(servicer) as address:
        stream = await wait(opened(address).stream, "Hi")
        pending = asyncio.create_task(step(stream))
        await asyncio.sleep(0.2)
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(pending, 2)
    assert len(servicer.requests) == 1


async def test_closing_the_client_ends_its_streams(opened: Open) -> None:
    servicer = Servicer([[started(), 30.0]])
    async with serving(servicer) as address:
        client = opened(address)
        pending = asyncio.create_task(wait(client.generate, "Hi"))
        async with asyncio.timeout(5):
            while not servicer.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await wait(client.close)
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(pending, 5)
        await asyncio.wait_for(servicer.cancelled.wait(), 5)
        with pytest.raises(RuntimeError, match="closed"):
            await wait(client.generate, "Hi")


async def test_a_stream_without_an_end_is_an_error(opened: Open) -> None:
    async with serving(
        Servicer([[started("r-3"), chunk("a", 1)], [started(), chunk("a", 1), finished(), finished()]])
    ) as address:
        for _ in range(2):
            with pytest.raises(InternalError):
                await wait(opened(address).generate, "Hi")


async def test_an_error_after_the_answer_does_not_take_it_back(opened: Open) -> None:
    async with serving(Servicer([[*HELLO, UnavailableError("shutting down")]])) as address:
        assert (await wait(opened(address).generate, "Hi")).text == "Hello you"


async def test_models_and_status(opened: Open) -> None:
    servicer = Servicer(queries=[UnavailableError("starting"), UnavailableError("starting")])
    async with serving(servicer) as address:
        client = opened(address)
        assert await wait(client.models) == (kadence.ModelInfo("tiny", 64, 100, "ngram"),)
        status = await wait(client.status)
        servicer.queries += [kadence.PermissionDeniedError("no")]
        with pytest.raises(kadence.PermissionDeniedError):
            await wait(client.status)
    assert (status.policy, status.policy_epoch, status.requests_in_flight, status.requests_queued) == (
        "fixed:7",
        "b:1",
        2,
        1,
    )
    (replica,) = status.replicas
    assert (replica.kind, replica.kv_pages_used, replica.stats.acceptance_length) == ("verifier", 3, 2.5)


async def test_many_at_once(opened: Open) -> None:
    async with serving(Servicer([[started(), 0.1, chunk("a", 1), finished()]])) as address:
        client = opened(address)
        results = await asyncio.gather(*(wait(client.generate, "Hi") for _ in range(50)))
    assert {result.text for result in results} == {"a"}


async def test_a_cancelled_task_stays_cancelled() -> None:
    servicer = Servicer([[started(), 30.0]])
    async with serving(servicer) as address, AsyncClient(address) as client:
        task = asyncio.create_task(client.generate("Hi"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(servicer.cancelled.wait(), 5)


async def test_asyncio_timeout_works_around_a_request() -> None:
    servicer = Servicer([[started(), 30.0]])
    async with serving(servicer) as address, AsyncClient(address) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate("Hi")


async def test_the_synchronous_client_is_a_context_manager() -> None:
    async with serving(Servicer()) as address:

        def run() -> str:
            with Client(address) as client, client.stream("Hi") as stream:
                return "".join(part.text for part in stream)

        assert await asyncio.to_thread(run) == "Hello you"
