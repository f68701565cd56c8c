"""Reads a request's JSON body, bounded in size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from kadence.errors import InvalidRequestError, RequestCancelledError

MAX_BYTES = 4 * 1024 * 1024
"""Longest body. It is parsed in one go: millions of empty lists would keep everybody waiting, heartbeats too."""
READ_SECONDS = 60.0
"""Longest wait for a whole body."""
# A client that still sends does not read: of a body that is too long as much as this is taken before it is told.
_PATIENCE_BYTES = 16 * MAX_BYTES


async def read(request: Request) -> Any:
    """The JSON value of the body, whatever its content type says.

    Raises InvalidRequestError, HTTPException (413, 408), or RequestCancelledError when the client leaves.
    """
    length = request.headers.get("content-length", "0")
    waits = request.headers.get("expect", "").lower() == "100-continue"
    if waits and length.isdecimal() and int(length) > MAX_BYTES:
        _refuse(int(length))
    chunks, size = [], 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BYTES:
                    chunks.append(chunk)
                elif size > _PATIENCE_BYTES:
                    break
    except TimeoutError:
        raise HTTPException(408, f"the body did not come within {READ_SECONDS:g} s", {"connection": "close"}) from None
    except ClientDisconnect:
        raise RequestCancelledError("the client left") from None
    if size > MAX_BYTES:
        _refuse(size)
    return parse(b"".join(chunks))


def parse(raw: bytes) -> Any:
    """The JSON value of `raw`. Raises InvalidRequestError."""
    if not raw.strip():
        raise InvalidRequestError("the body is empty; a JSON object is needed")
    try:
        return json.loads(raw, parse_constant=_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidRequestError(f"the body is not valid JSON: {error.msg} at {where}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is not valid JSON: nested too deep") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _refuse(size: int) -> NoReturn:
    raise HTTPException(413, f"the body has {size} bytes or more; at most {MAX_BYTES}", {"connection": "close"})
