"""HTTP by hand, so that tests may also send what no client would."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Response:
    """A response without its chunks' frames; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def post(
    address: str, path: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    """Posts JSON, or bytes as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await request(address, "POST", path, raw, {"content-type": "application/json", **(headers or {})})


async def request(
    address: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Response:
    """One request on a connection of its own."""
    fields = {"host": address, "connection": "close", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return await exchange(address, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body, method)


async def exchange(address: str, raw: bytes, method: str = "POST") -> Response:
    """Sends bytes and reads the response, until the server closes or it is complete."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    try:
        async with asyncio.timeout(20):
            writer.write(raw)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            return await _read(reader, method)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, method: str) -> Response:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    if " 100 " in f"{status} ":
        return await _read(reader, method)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if method == "HEAD":
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = await _chunks(reader)
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return Response(int(status.split()[1]), headers, body)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)
