"""Liveness of permanent streams: each side sends a beat every interval, two missed in a row mean the peer is dead."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from kadence.errors import UnavailableError
from kadence.internal import common_pb2

M = TypeVar("M")

_MISSED = 2.5  # intervals of silence: two missed beats, and half an interval for the third's way


async def beat(send: Callable[[common_pb2.Heartbeat], None], seconds: float) -> None:
    """Calls `send` with a counted heartbeat every `seconds`, until cancelled."""
    for sequence in itertools.count(1):
        await asyncio.sleep(seconds)
        send(common_pb2.Heartbeat(sequence=sequence))


async def alive(messages: AsyncIterator[M], seconds: Callable[[], float], peer: str) -> AsyncIterator[M]:
    """The stream's messages, any of which is a sign of life; `seconds()` is the interval, asked before each.

    Raises UnavailableError once the peer missed two beats.
    """
    while True:
        limit = seconds() * _MISSED
        try:
            async with asyncio.timeout(limit):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise UnavailableError(f"{peer} sent nothing for {limit:.1f} s") from None
        yield message
