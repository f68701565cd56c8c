"""Requests against a running cluster as any client makes them, with the time of every arrival."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kadence import AsyncClient, GenerateResult


@dataclass(frozen=True)
class Answer:
    """A finished answer; `arrivals` are (seconds since the round's begin, tokens) of its chunks."""

    result: GenerateResult
    arrivals: list[tuple[float, int]]

    @property
    def intervals(self) -> list[float]:
        """Seconds between chunks; at one stream a chunk is a step."""
        times = [moment for moment, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True)
class Round:
    """Requests that were made at once, in their order."""

    answers: list[Answer]
    seconds: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second, all streams together, while every stream decodes: no prefill before or among them."""
        begin = max(answer.arrivals[0][0] for answer in self.answers)
        end = min(answer.arrivals[-1][0] for answer in self.answers)
        assert begin < end, "the first answer ended before the last had begun: ask for more tokens"
        tokens = sum(count for a in self.answers for moment, count in a.arrivals if begin < moment <= end)
        return tokens / (end - begin)

    @property
    def whole_rate(self) -> float:
        """Tokens per second from the first request to the last answer's end, prefill included."""
        return sum(len(answer.result.token_ids) for answer in self.answers) / self.seconds


async def play(client: AsyncClient, requests: Sequence[Mapping[str, Any]], at_once: int = 0) -> Round:
    """Makes all `requests` (keywords of AsyncClient.stream), `at_once` at a time or all. Raises APIError."""
    begun = time.perf_counter()
    seats = asyncio.Semaphore(at_once or len(requests))

    async def one(request: Mapping[str, Any]) -> Answer:
        arrivals = []
        async with seats, client.stream(**request) as stream:
            async for chunk in stream:
                if chunk.token_ids:
                    arrivals.append((time.perf_counter() - begun, len(chunk.token_ids)))
            return Answer(stream.result, arrivals)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return Round([task.result() for task in tasks], time.perf_counter() - begun)
