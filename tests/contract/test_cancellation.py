"""A task that is cancelled ends, even if the call it waits for fails in the same moment."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.runtime.channels import GrpcStream


class SwallowingCall:
    """As grpc.aio when a call fails while its start is awaited: it keeps the error, not the cancellation."""

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


async def test_a_timeout_stays_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(GrpcStream(SwallowingCall()))
