"""The routes: a request is read, checked, accepted, answered.

Authorization headers are accepted and ignored; tokens come with a later version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kadence.errors import APIError, NotFoundError
from services.runtime.errors import to_api_error
from services.scheduler.generation import Intake
from services.scheduler.http import body, errors, requests
from services.scheduler.http.edge import REQUEST_ID
from services.scheduler.http.job import Event, Job
from services.scheduler.http.shapes import CHAT, COMPLETION, Chunks, Shape, Whole, encode_bytes
from services.scheduler.request import Ask
from services.scheduler.tokenizer import Tokenizer

_SEED_BITS = 53  # exact in every JSON reader
_SSE = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies hand chunks on as they come

_LARGE = 16 * 1024  # bytes after which others have their turn, as `send` waits only for a full socket

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class Api:
    """The endpoints. `drafter()` is the deployment's drafter kind, `serving()` whether new requests are taken."""

    def __init__(
        self,
        intake: Intake,
        tokenizer: Tokenizer,
        drafter: Callable[[], str],
        serving: Callable[[], bool],
        *,
        created: int,
        longest: float,
    ) -> None:
        self._intake = intake
        self._tokenizer = tokenizer
        self._drafter = drafter
        self._serving = serving
        self._created = created
        self._longest = longest
        """Seconds that a response may take; a client that does not read must not stay for ever."""

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/models", _guarded(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", _guarded(self.model), methods=["GET"]),
            Route("/v1/completions", _guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", _guarded(self.chat), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    async def health(self, request: Request) -> Response:
        """200 while new requests are taken."""
        if self._serving():
            return _json({"status": "ok"})
        return _json({"status": "draining"}, 503)

    async def models(self, request: Request) -> Response:
        """The one model, in a list."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The one model."""
        self._know(request.path_params["name"])
        return _json(self._model())

    async def completions(self, request: Request) -> Response:
        """One answer, or n, for each prompt."""
        asked = requests.parse(requests.CompletionRequest, await body.read(request))
        if asked.model:
            self._know(asked.model)
        options, request_id, prompts = asked.options(), request.scope[REQUEST_ID], asked.prompts()
        if len(prompts) > 1 and options.seed is None:  # each prompt's answers are those it would have alone
            options = replace(options, seed=secrets.randbits(_SEED_BITS))
        asks, names = [], []
        for index, prompt in enumerate(prompts):
            place = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            own_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            ask = Ask(request_id=own_id, model=asked.model, options=options)
            if isinstance(prompt, str):
                asks.append(replace(ask, prompt=prompt))
            else:
                asks.append(replace(ask, prompt_token_ids=prompt))
            names.append(asked.names() | {"prompt": place, "prompt_token_ids": place})
        job = await Job.open(self._intake, request_id, asks, names, request.receive)
        return await self._answer(COMPLETION, asked, job)

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation, or n of them."""
        asked = requests.parse(requests.ChatRequest, await body.read(request))
        if asked.model:
            self._know(asked.model)
        ask = Ask(
            request_id=request.scope[REQUEST_ID],
            model=asked.model,
            messages=asked.conversation(),
            options=asked.options(),
        )
        job = await Job.open(self._intake, ask.request_id, [ask], [asked.names()], request.receive)
        return await self._answer(CHAT, asked, job)

    def _know(self, model: str) -> None:
        served = self._intake.limits().model
        if model != served:
            raise errors.ModelNotFoundError(model, served)

    def _model(self) -> dict[str, Any]:
        limits = self._intake.limits()
        return {
            "id": limits.model,
            "object": "model",
            "created": self._created,
            "owned_by": "kadence",
            "max_model_len": limits.max_model_len,
            "kadence": {"vocab_size": limits.vocab_size, "drafter": self._drafter()},
        }

    async def _answer(self, shape: Shape, asked: requests.Request, job: Job) -> Response:
        with_logprobs = asked.top() is not None
        try:
            events = job.events()
            if asked.stream:
                chunks = Chunks(
                    shape, job, self._tokenizer, with_logprobs=with_logprobs, include_usage=asked.include_usage
                )
                # What fails before the first token still has a status of its own.
                return _Stream(job, chunks, await anext(events), events, self._longest)
            whole = Whole(shape, job, self._tokenizer, with_logprobs=with_logprobs)
            async with contextlib.aclosing(events):
                async for index, event in events:
                    whole.add(index, event)
                    await asyncio.sleep(0)  # what came together is not worked off in one go
            job.close()
            return Response(await whole.body(), media_type="application/json")
        except BaseException:
            job.close()
            raise


class _Stream(Response):
    """Server-sent events, written as fast as the client reads them."""

    def __init__(
        self, job: Job, chunks: Chunks, first: Event, events: AsyncGenerator[Event, None], longest: float
    ) -> None:
        super().__init__(headers=_SSE, media_type="text/event-stream")
        del self.headers["content-length"]
        self._job, self._chunks, self._first, self._events, self._longest = job, chunks, first, events, longest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})
            if len(data) > _LARGE:
                await asyncio.sleep(0)

        try:
            async with asyncio.timeout(self._longest):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    await write(self._chunks.of(*self._first))
                    async with contextlib.aclosing(self._events) as events:
                        async for index, event in events:
                            if data := self._chunks.of(index, event):
                                await write(data)
                except Exception as exc:
                    if not self._job.left:
                        await write(b"data: " + encode_bytes(errors.answer(to_api_error(exc)).body) + b"\n\n")
                await write(b"", more=False)
        except TimeoutError:
            _log.warning("the client does not read; its connection is closed")
        finally:
            self._job.close()


def _guarded(endpoint: Endpoint) -> Endpoint:
    """`endpoint`, whose exceptions become error responses."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HTTPException:
            raise
        except Exception as exc:
            return error_response(to_api_error(exc))

    return guarded


def error_response(error: APIError) -> Response:
    """The response that `error` means."""
    status, content, headers = errors.answer(error)
    return _json(content, status, headers)


async def _http_error(request: Request, exc: Exception) -> Response:
    """What the framework and the body's reader refuse: 404, 405, 408, 413."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        return error_response(NotFoundError(f"no such path: {request.method} {request.url.path[:128]}"))
    detail = exc.detail
    if exc.status_code == 405:
        detail = f"{request.method} is not allowed for {request.url.path}"
    return _json(errors.body(detail, "invalid_request_error"), exc.status_code, dict(exc.headers or {}))


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_bytes(content), status, headers, "application/json")
