"""A task that is cancelled ends, even if the call it waits for fails in the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.runtime.channels import GrpcStream


class SwallowingCall:
    """As grpc.aio when a call fails while its start is awaited: it keeps the error, not the cancellation."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def read(self) -> Any:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "refused") from None


async def test_a_swallowed_cancellation_is_given_back() -> None:
    stream = GrpcStream(SwallowingCall())
    task = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


class ForgettingCall(SwallowingCall):
    """As grpc.aio when its reader is cancelled while the call's start is awaited: the call goes on."""

    async def read(self) -> Any:
        await asyncio.sleep(10)


async def test_a_call_whose_reader_was_cancelled_is_cancelled() -> None:
    call = ForgettingCall()
    task = asyncio.create_task(anext(GrpcStream(call)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.cancelled


async def test_a_timeout_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(GrpcStream(SwallowingCall()))
