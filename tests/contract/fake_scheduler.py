"""A scheduler's Attach stream for tests: hears everything, says what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kadence.internal import common_pb2, control_pb2, control_pb2_grpc
from services.runtime.config import ServiceConfig
from services.runtime.heartbeat import beat
from services.runtime.inproc import InprocServer
from services.runtime.metrics import Metrics
from services.runtime.server import GrpcServer

Answer = control_pb2.AttachResponse


class FakeScheduler(control_pb2_grpc.ControlServiceServicer):
    """Records what replicas say; `say` goes to the newest stream, which beats unless `mute`."""

    def __init__(self) -> None:
        self.heard: list[control_pb2.AttachRequest] = []
        self.say: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.mute = False

    def of(self, kind: str) -> list[Any]:
        return [getattr(request, kind) for request in self.heard if request.WhichOneof("event") == kind]

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[Answer]:
        say = self.say = asyncio.Queue()
        self.heard.append(await anext(request_iterator))
        yield Answer(registered=control_pb2.Registered(scheduler_id="s", heartbeat_seconds=0.1))

        async def listen() -> None:
            async for request in request_iterator:
                self.heard.append(request)

        def send(heartbeat: common_pb2.Heartbeat) -> None:
            if not self.mute:
                say.put_nowait(Answer(heartbeat=heartbeat))

        tasks = [asyncio.create_task(listen()), asyncio.create_task(beat(send, 0.1))]
        try:
            while (answer := await say.get()) is not None:
                yield answer
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def serving(transport: str, scheduler: FakeScheduler, port: int = 0) -> AsyncIterator[str]:
    config = ServiceConfig(port=port)
    server: Any = GrpcServer(config, Metrics("scheduler")) if transport == "grpc" else InprocServer("attach")
    server.add(control_pb2_grpc.add_ControlServiceServicer_to_server, scheduler, "kadence.internal.ControlService")
    try:
        yield await server.start()
    finally:
        await server.drain(0)
