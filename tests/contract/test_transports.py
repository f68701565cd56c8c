"""Both transports behave alike: answers, errors with their details, cancellation, deadlines, permanent streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kadence.errors import (
    BY_CODE,
    APIError,
    DeadlineExceededError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    UnsupportedError,
)
from kadence.internal import common_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2_grpc
from services.runtime.channels import Peer, connect
from services.runtime.config import ServiceConfig
from services.runtime.inproc import InprocServer
from services.runtime.metrics import Metrics
from services.runtime.server import MAX_MESSAGE_BYTES, GrpcServer

SERVICE = "kadence.internal.DrafterService"
Request, Response = drafter_pb2.DraftRequest, drafter_pb2.DraftResponse


class Servicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Does what the test says."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.cancelled = asyncio.Event()
        self.seen: list[int] = []

    async def DescribeDrafter(self, request: Any, context: Any) -> drafter_pb2.DescribeDrafterResponse:
        if self.error is not None:
            raise self.error
        if request.caller.kind == "slow":
            await self._hang()
        return drafter_pb2.DescribeDrafterResponse(drafter=common_pb2.Description(kind=request.caller.kind))

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[Response]:
        try:
            async for request in request_iterator:
                self.seen.append(request.step)
                if request.step == 13:
                    raise ValueError("secret internals")
                if request.step == 14:
                    return
                yield Response(step=request.step)
        finally:
            self.cancelled.set()

    async def FetchProjection(self, request: Any, context: Any) -> AsyncIterator[drafter_pb2.FetchProjectionResponse]:
        for offset in range(200):
            yield drafter_pb2.FetchProjectionResponse(offset=offset)
        if self.error is not None:
            raise self.error

    async def _hang(self) -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Both:
    """A servicer, its server and a peer, over one transport."""

    def __init__(self, transport: str) -> None:
        self.servicer = Servicer()
        self.metrics = Metrics("test")
        self.server: Any = (
            GrpcServer(ServiceConfig(), self.metrics) if transport == "grpc" else InprocServer("transports")
        )
        self.peer: Peer[Any]

    async def __aenter__(self) -> Both:
        self.server.add(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, self.servicer, SERVICE)
        self.peer = connect(drafter_pb2_grpc.DrafterServiceStub, await self.server.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.peer.close()
        await self.server.drain(0)

    async def describe(self, kind: str = "test", **options: Any) -> str:
        request = drafter_pb2.DescribeDrafterRequest(caller=common_pb2.Description(kind=kind))
        return (await self.peer.stub.DescribeDrafter(request, **options)).drafter.kind


@pytest.fixture(params=["grpc", "inproc"])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Both]:
    async with Both(request.param) as it:
        yield it


async def test_unary(both: Both) -> None:
    assert await both.describe("hello", timeout=5) == "hello"


@pytest.mark.parametrize("code", sorted(BY_CODE))
async def test_every_status_survives(both: Both, code: str) -> None:
    sent = BY_CODE[code](f"about {code}", request_id="r-1")
    sent.code = code
    both.servicer.error = sent
    with pytest.raises(APIError) as caught:
        await both.describe()
    assert (type(caught.value), caught.value.code) == (BY_CODE[code], code)
    assert (caught.value.message, caught.value.request_id) == (f"about {code}", "r-1")


async def test_details_survive(both: Both) -> None:
    both.servicer.error = InvalidRequestError.of("sampling.top_p", "is 3; must be in (0, 1]")
    with pytest.raises(InvalidRequestError) as invalid:
        await both.describe()
    assert invalid.value.violations == (FieldViolation("sampling.top_p", "is 3; must be in (0, 1]"),)
    both.servicer.error = OverloadedError("queue is full", retry_after=2.5)
    with pytest.raises(OverloadedError) as overloaded:
        await both.describe()
    assert overloaded.value.retry_after == 2.5


async def test_internals_do_not_leak(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    both.servicer.error = ValueError("secret internals")
    with pytest.raises(InternalError) as caught:
        await both.describe()
    assert "secret" not in caught.value.message
    assert caught.value.request_id and caught.value.request_id in caught.value.message
    assert "secret internals" in caplog.text and caught.value.request_id in caplog.text


async def test_server_stream_then_error(both: Both) -> None:
    both.servicer.error = OverloadedError("enough")
    got = []
    with pytest.raises(OverloadedError, match="enough"):
        async for response in both.peer.stub.FetchProjection(drafter_pb2.FetchProjectionRequest(), timeout=10):
            got.append(response.offset)
    assert got == list(range(200))


async def test_bidi_in_lockstep(both: Both) -> None:
    queue: asyncio.Queue[Request | None] = asyncio.Queue()
    call = both.peer.stub.Draft(_drain(queue))
    for step in range(1, 6):
        queue.put_nowait(Request(step=step))
        assert (await anext(call)).step == step
    queue.put_nowait(None)
    assert [response async for response in call] == []


async def test_bidi_error_reaches_the_reader(both: Both) -> None:
    queue: asyncio.Queue[Request | None] = asyncio.Queue()
    call = both.peer.stub.Draft(_drain(queue))
    queue.put_nowait(Request(step=13))
    with pytest.raises(InternalError):
        await anext(call)


async def test_server_ends_stream_and_the_request_iterator_is_closed(both: Both) -> None:
    queue: asyncio.Queue[Request | None] = asyncio.Queue()
    closed = asyncio.Event()
    call = both.peer.stub.Draft(_drain(queue, closed))
    queue.put_nowait(Request(step=14))
    assert [response async for response in call] == []
    await asyncio.wait_for(closed.wait(), 5)


async def test_cancel_reaches_both_sides(both: Both) -> None:
    queue: asyncio.Queue[Request | None] = asyncio.Queue()
    closed = asyncio.Event()
    call = both.peer.stub.Draft(_drain(queue, closed))
    queue.put_nowait(Request(step=1))
    await anext(call)
    call.cancel()
    with pytest.raises(RequestCancelledError):
        await anext(call)
    await asyncio.wait_for(both.servicer.cancelled.wait(), 5)
    await asyncio.wait_for(closed.wait(), 5)


async def test_cancelled_reader_cancels_the_call(both: Both) -> None:
    queue: asyncio.Queue[Request | None] = asyncio.Queue()
    call = both.peer.stub.Draft(_drain(queue))
    queue.put_nowait(Request(step=1))
    await anext(call)
    reader = asyncio.create_task(anext(call))
    await asyncio.sleep(0.05)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(both.servicer.cancelled.wait(), 5)


async def test_deadline(both: Both) -> None:
    with pytest.raises(DeadlineExceededError):
        await both.describe("slow", timeout=0.1)
    await asyncio.wait_for(both.servicer.cancelled.wait(), 5)


async def test_failing_request_iterator_reaches_the_reader(both: Both) -> None:
    async def requests() -> AsyncIterator[Request]:
        yield Request(step=1)
        raise KeyError("our own bug")

    with pytest.raises(KeyError, match="our own bug"):
        async for _ in both.peer.stub.Draft(requests()):
            pass
    await asyncio.wait_for(both.servicer.cancelled.wait(), 5)


async def test_service_not_offered(both: Both) -> None:
    async with connect(verifier_pb2_grpc.VerifierServiceStub, both.server.address) as stub:
        with pytest.raises(UnsupportedError):
            await stub.DescribeVerifier(drafter_pb2.DescribeDrafterRequest(), timeout=5)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "inproc://nobody"])
async def test_nobody_there(address: str) -> None:
    async with connect(drafter_pb2_grpc.DrafterServiceStub, address) as stub:
        with pytest.raises(UnavailableError):
            await stub.DescribeDrafter(drafter_pb2.DescribeDrafterRequest(), timeout=5)
        with pytest.raises(UnavailableError):
            await anext(stub.Draft(_drain(asyncio.Queue())))


async def test_drain_lets_running_calls_end_then_ends_them(both: Both) -> None:
    queue: asyncio.Queue[Request | None] = asyncio.Queue()
    call = both.peer.stub.Draft(_drain(queue))
    queue.put_nowait(Request(step=1))
    await anext(call)
    draining = asyncio.create_task(both.server.drain(0.3))
    await asyncio.sleep(0.1)
    queue.put_nowait(Request(step=2))
    assert (await anext(call)).step == 2
    with pytest.raises(APIError):
        await both.describe(timeout=5)
    with pytest.raises(UnavailableError):
        await anext(call)
    await draining
    await asyncio.wait_for(both.servicer.cancelled.wait(), 5)


async def test_large_messages_up_to_the_limit() -> None:
    async with Both("grpc") as grpc:
        assert len(await grpc.describe("x" * (MAX_MESSAGE_BYTES - 100), timeout=30)) == MAX_MESSAGE_BYTES - 100
        with pytest.raises(OverloadedError):
            await grpc.describe("x" * (MAX_MESSAGE_BYTES + 1), timeout=30)


async def test_calls_are_counted() -> None:
    async with Both("grpc") as grpc:
        await grpc.describe()
        grpc.servicer.error = InvalidRequestError("no")
        with pytest.raises(InvalidRequestError):
            await grpc.describe()
        labels = {"grpc_service": SERVICE, "grpc_method": "DescribeDrafter", "grpc_type": "unary"}
        value = grpc.metrics.registry.get_sample_value
        assert value("grpc_server_started_total", labels) == 2
        assert value("grpc_server_handled_total", {**labels, "grpc_code": "OK"}) == 1
        assert value("grpc_server_handled_total", {**labels, "grpc_code": "INVALID_ARGUMENT"}) == 1
        assert value("grpc_server_handling_seconds_count", labels) == 2


async def _drain(queue: asyncio.Queue[Request | None], closed: asyncio.Event | None = None) -> AsyncIterator[Request]:
    try:
        while (request := await queue.get()) is not None:
            yield request
    finally:
        if closed is not None:
            closed.set()
