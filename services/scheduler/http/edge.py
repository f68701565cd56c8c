"""What every request passes before its route: an id, a place among the running ones, and the count of its answer."""

from __future__ import annotations

import time
import uuid

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kadence.errors import APIError, FieldViolation, OverloadedError
from services.runtime import logs
from services.scheduler import validate
from services.scheduler.http import errors
from services.scheduler.http.metrics import HttpMetrics
from services.scheduler.http.shapes import encode_bytes

REQUEST_ID = "kadence.request_id"
"""Key of the scope."""
_HEADER = "x-request-id"


class Edge:
    """Wraps the application. Of `most` requests at once one more is refused before its body is read."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, most: int) -> None:
        self._app = app
        self._metrics = metrics
        self._most = most
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        began, status = time.monotonic(), 499
        given = Headers(scope=scope).get(_HEADER, "").strip()
        refused = self._refuse(given, scope["path"])
        request_id = given if given and refused is None else uuid.uuid4().hex

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        scope[REQUEST_ID] = request_id
        logs.request_id.set(request_id)
        self._running += 1
        try:
            await (self._app if refused is None else _response(refused))(scope, receive, sending)
        finally:
            self._running -= 1
            self._metrics.answered(scope, status, time.monotonic() - began)

    def _refuse(self, given: str, path: str) -> APIError | None:
        if self._running >= self._most and path != "/health":
            return OverloadedError(f"{self._running} requests are running, at most {self._most} may")
        if len(given) > validate.MAX_REQUEST_ID_BYTES:
            return _wrong_id(f"{len(given)} bytes; at most {validate.MAX_REQUEST_ID_BYTES}")
        if not (given.isascii() and given.isprintable()):
            return _wrong_id("has characters other than printable ASCII")
        return None


def _wrong_id(reason: str) -> APIError:
    return validate.error([FieldViolation(_HEADER, reason)])


def _response(error: APIError) -> Response:
    status, content, headers = errors.answer(error)
    return Response(encode_bytes(content), status, headers | {"connection": "close"}, "application/json")
