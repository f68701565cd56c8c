"""A drafter replica: from configuration to a served, attached engine, and back to nothing."""

from __future__ import annotations

import asyncio
import os

from kadence.internal import common_pb2, control_pb2, drafter_pb2_grpc
from services.drafter.config import DrafterConfig
from services.drafter.engine import Engine
from services.drafter.methods import Method, Setting, Traits, create
from services.drafter.metrics import DrafterMetrics
from services.drafter.servicer import DrafterServicer
from services.runtime import identity, threads
from services.runtime.attach import Attachment
from services.runtime.inproc import InprocServer
from services.runtime.metrics import Metrics
from services.runtime.server import MAX_MESSAGE_BYTES, GrpcServer

NAME = "kadence.internal.DrafterService"


class DrafterService:
    """`inproc_name` serves under that name inside this process instead of on a port."""

    def __init__(self, config: DrafterConfig, *, inproc_name: str | None = None) -> None:
        self._config = config
        self._metrics = Metrics("drafter")
        self._server = InprocServer(inproc_name) if inproc_name else GrpcServer(config, self._metrics)
        self._attachment = Attachment(config.scheduler, self._register) if config.scheduler else None
        self.address = ""
        self.metrics_address = ""

    async def start(self) -> str:
        """Loads the method, serves, then attaches; returns the address. Raises ConfigError or CheckpointError."""
        config = self._config
        method = await asyncio.to_thread(threads.in_passing, lambda: _method(config))
        self._engine = Engine(method, config.max_sessions, DrafterMetrics(self._metrics.registry))
        self._description = _describe(method.traits, config)
        servicer = DrafterServicer(
            self._engine, method.traits, method.projection, self._description, config.heartbeat_seconds, self._report
        )
        self._server.add(drafter_pb2_grpc.add_DrafterServiceServicer_to_server, servicer, NAME)
        self.metrics_address = self._metrics.start(config.host, config.metrics_port)
        self.address = await self._server.start()
        if self._attachment is not None:
            await self._attachment.start()
        return self.address

    async def drain(self, grace: float) -> None:
        """Asks for no new sessions, waits up to `grace` seconds for the open ones, stops."""
        if self._attachment is not None:
            self._attachment.drain()
        await self._engine.wait_idle(grace)
        if self._attachment is not None:
            await self._attachment.close()
        await self._server.drain(0)
        self._engine.close()
        await asyncio.to_thread(self._metrics.close)

    async def health(self) -> bool:
        """Whether the compute thread still answers."""
        return bool(self.address) and await self._engine.responsive(5.0)

    def _register(self) -> control_pb2.Register:
        return control_pb2.Register(
            description=self._description,
            address=self.address,
            metrics_address=self.metrics_address,
            pid=os.getpid(),
        )

    def _report(self) -> None:
        if self._attachment is not None:
            engine = self._engine
            self._attachment.report_load(
                control_pb2.Load(running=engine.sessions, steps=engine.steps, step_seconds=engine.step_seconds)
            )


def _method(config: DrafterConfig) -> Method:
    setting = Setting(config.max_draft_tokens, config.max_sessions, config.kv_tokens, config.model)
    return create(config.kind, config.options, setting)


def _describe(traits: Traits, config: DrafterConfig) -> common_pb2.Description:
    return common_pb2.Description(
        kind="drafter",
        replica_id=identity.replica_id("drafter"),
        drafter_kind=traits.kind,
        block_size=traits.block_size,
        max_draft_tokens=traits.max_draft_tokens,
        taps=traits.taps,
        feature_width=traits.feature_width,
        vocab_size=traits.vocab_size,
        window=traits.window,
        model_fingerprint=traits.model_fingerprint,
        kv_tokens=traits.kv_tokens,
        max_sessions=config.max_sessions,
        max_rows=traits.max_rows,
        max_message_bytes=MAX_MESSAGE_BYTES,
        feature_fingerprint=traits.feature_fingerprint,
        feature_norm_eps=traits.feature_norm_eps,
        signals=traits.signals,
        version=identity.version(),
        supports_ratio=traits.supports_ratio,
    )
