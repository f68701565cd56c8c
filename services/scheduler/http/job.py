"""What one HTTP request asked for: a generation per prompt, read as one stream of numbered answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from starlette.types import Receive

from kadence.errors import InvalidRequestError
from services.scheduler.generation import Generation, Intake
from services.scheduler.http import errors
from services.scheduler.outcomes import End, Piece
from services.scheduler.request import Ask

Event = tuple[int, Piece | End]
"""(index of the answer in the whole request, what came)."""


class Job:
    """The accepted generations of one request. Whoever opens it closes it, and the client's leaving closes it too."""

    def __init__(self, request_id: str, generations: list[Generation], receive: Receive) -> None:
        self.request_id = request_id
        self.generations = generations
        self.created = int(time.time())
        self.first = generations[0]
        """They differ in their prompts only."""
        self.left = False
        """Whether the client has gone."""
        self._watch = asyncio.create_task(self._watch_client(receive), name=f"http client of {request_id}")

    @classmethod
    async def open(
        cls, intake: Intake, request_id: str, asks: Sequence[Ask], names: Sequence[Mapping[str, str]], receive: Receive
    ) -> Job:
        """Has every ask accepted, or none: then raises the APIError, its fields called by the `names` of that ask."""
        generations: list[Generation] = []
        try:
            for ask, called in zip(asks, names, strict=True):
                try:
                    generations.append(await intake.open(ask, None))
                except InvalidRequestError as error:
                    raise errors.renamed(error, called) from None
        except BaseException:
            for generation in generations:
                generation.close()
            raise
        return cls(request_id, generations, receive)

    @property
    def answers(self) -> int:
        """How many there are, of all prompts."""
        return len(self.generations) * self.first.n

    def events(self) -> AsyncGenerator[Event, None]:
        """Pieces and ends as they come. Raises APIError."""
        return _numbered(self.first, 0) if len(self.generations) == 1 else self._merged()

    def close(self) -> None:
        """Ends what still runs."""
        self._watch.cancel()
        self._cancel()

    def _cancel(self) -> None:
        for generation in self.generations:
            generation.close()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._cancel()

    async def _merged(self) -> AsyncGenerator[Event, None]:
        queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(1)  # a slow reader slows all of them
        tasks = [
            asyncio.create_task(_pump(_numbered(generation, index * generation.n), queue))
            for index, generation in enumerate(self.generations)
        ]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()


async def _numbered(generation: Generation, base: int) -> AsyncGenerator[Event, None]:
    async with contextlib.aclosing(generation.events(coalesce=True)) as events:  # type: ignore[type-var]
        async for event in events:
            yield base + event.index, event


async def _pump(events: AsyncGenerator[Event, None], queue: asyncio.Queue[Event | BaseException | None]) -> None:
    try:
        async for event in events:
            await queue.put(event)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
