"""Clients in processes of their own that stream the same answers, over gRPC or over HTTP; idle while not asked."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.child import child

One = Callable[[str, int], Any]


@dataclass(frozen=True)
class Played:
    """One round: all answers at once."""

    seconds: float
    tokens: int
    """As the servers count them, all answers together."""
    chunks: int
    texts: list[str]

    @property
    def rate(self) -> float:
        """Tokens per second from the first request to the last answer's end."""
        return self.tokens / self.seconds


class Rival:
    """A client over there."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def play(self, texts: list[str], tokens: int) -> Played:
        """Asks all at once for greedy answers of `tokens` tokens. Raises RuntimeError if it fails there."""
        self._pipe.send((texts, tokens))
        error, played = self._pipe.recv()
        if error:
            raise RuntimeError(f"client: {error}")
        assert isinstance(played, Played)
        return played


@contextmanager
def rival(kind: str, address: str) -> Iterator[Rival]:
    """A process with the client KINDS[kind] of the server at `address`."""
    with child(_serve, kind, address) as pipe:
        yield Rival(pipe)


def _serve(pipe: Connection, kind: str, address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker decides when this ends
    asyncio.run(_answer(pipe, kind, address))


async def _answer(pipe: Connection, kind: str, address: str) -> None:
    async with KINDS[kind](address) as one:
        while True:
            try:
                texts, tokens = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            try:
                pipe.send((None, await _play(one, texts, tokens)))
            except Exception as error:
                pipe.send((f"{type(error).__name__}: {error}", None))


async def _play(one: One, texts: list[str], tokens: int) -> Played:
    begun = time.perf_counter()
    answers = await asyncio.gather(*(one(text, tokens) for text in texts))
    seconds = time.perf_counter() - begun
    pieces, counts = zip(*answers, strict=True)
    return Played(seconds, sum(counts), sum(map(len, pieces)), ["".join(each) for each in pieces])


@asynccontextmanager
async def _grpc(address: str) -> AsyncIterator[One]:
    """The SDK."""
    from kadence import AsyncClient

    async with AsyncClient(address) as client:

        async def one(text: str, tokens: int) -> tuple[list[str], int]:
            messages = [{"role": "user", "content": text}]
            async with client.stream(messages=messages, max_tokens=tokens, ignore_eos=True) as stream:
                pieces = [chunk.text async for chunk in stream]
            return pieces, len(stream.result.token_ids)

        yield one


@asynccontextmanager
async def _http(address: str) -> AsyncIterator[One]:
    """Plain HTTP over a socket, as a load generator does it: each event's JSON is read, and no more is made of it."""
    host, _, port = address.rpartition(":")

    async def one(text: str, tokens: int) -> tuple[list[str], int]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
        sent = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + sent)
            if b" 200 " not in (status := await reader.readline()):
                raise RuntimeError(status.decode().strip())
            pieces, count = [], 0
            # Events begin with their line; headers, and the sizes of HTTP's chunks, do not.
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                pieces += [text for choice in event["choices"] if (text := choice["delta"].get("content"))]
                count = event["usage"]["completion_tokens"] if event.get("usage") else count
            return pieces, count
        finally:
            writer.close()

    yield one


@asynccontextmanager
async def _openai(address: str) -> AsyncIterator[One]:
    """The `openai` package."""
    import openai

    http = openai.DefaultAsyncHttpxClient(trust_env=False)  # a proxy is no way to this very machine
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", http_client=http) as client:

        async def one(text: str, tokens: int) -> tuple[list[str], int]:
            stream = await client.chat.completions.create(
                model="",
                messages=[{"role": "user", "content": text}],
                max_tokens=tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            pieces, count = [], 0
            async for chunk in stream:
                pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
                count = chunk.usage.completion_tokens if chunk.usage else count
            return pieces, count

        yield one


KINDS = {"gRPC SDK": _grpc, "HTTP": _http, "openai package": _openai}
