"""Runs the HTTP application in the scheduler's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from kadence.errors import ConfigError
from services.runtime import addresses

_KEEP_ALIVE_SECONDS = 75  # longer than the idle time of usual proxies, which would otherwise race with our close
_BACKLOG = 1024
_STOP_SECONDS = 5


class HttpServer:
    """One server: bound when it is made, so that a taken port is told before anything runs; then `start` and `stop`."""

    def __init__(self, host: str, advertise: str, port: int) -> None:
        """Raises ConfigError if the port is taken."""
        self._socket = bind(host, port)
        self.address = addresses.advertised(host, advertise, self._socket.getsockname()[1])
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp) -> None:
        """Serves `app`."""
        settings = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_STOP_SECONDS,
        )
        self._server = _Server(settings)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http server")
        up = asyncio.create_task(self._server.up.wait())
        await asyncio.wait((self._task, up), return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Closes idle connections, gives responses a few seconds to be flushed, ends."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        self._socket.close()


class _Server(uvicorn.Server):
    """Uvicorn without signal handlers: the process is its host's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.up.set()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError naming http_port and the address."""
    addresses.free("http_port", host, port)
    bare = host.strip("[]")
    family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((bare, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"http_port: {addresses.join(host, port)} cannot be bound: {error.strerror}") from error
