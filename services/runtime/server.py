"""The gRPC server every service runs: health, reflection, message limits, drain then stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kadence.errors import ConfigError
from services.runtime import addresses
from services.runtime.config import ServiceConfig
from services.runtime.interceptors import CallInterceptor, ServerMetrics
from services.runtime.metrics import Metrics

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Largest message, either way."""

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every 20-30 s; a default server answers more than one ping in five minutes with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 5),
)


class GrpcServer:
    """One listening server. Add servicers, `start`, and `drain` at the end; the shape InprocServer shares."""

    def __init__(self, config: ServiceConfig, metrics: Metrics) -> None:
        self._config = config
        interceptor = CallInterceptor(ServerMetrics(metrics.registry))
        self._server = grpc.aio.server(interceptors=[interceptor], options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []
        self.address = ""

    def add(self, register: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """Adds a servicer with its generated add_X_to_server and full service name ("kadence.v1.InferenceService")."""
        register(servicer, self._server)
        self._names.append(name)

    async def start(self) -> str:
        """Listens, reports SERVING and returns the address peers dial. Raises ConfigError if the port is taken."""
        config = self._config
        addresses.advertised(config.host, config.advertise, 0)
        addresses.free("port", config.host, config.port)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        listed = [*self._names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(listed, self._server)
        bind = addresses.join(config.host, config.port)
        try:
            port = self._server.add_insecure_port(bind)
        except RuntimeError as error:
            raise ConfigError(f"port: {bind} cannot be bound") from error
        await self._server.start()
        await self.set_serving(True)
        self.address = addresses.advertised(config.host, config.advertise, port)
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers, for each service and for "" (the whole server)."""
        states = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def drain(self, grace: float) -> None:
        """Reports NOT_SERVING, takes no new calls, gives running ones `grace` seconds, then stops."""
        await self.set_serving(False)
        await self._server.stop(grace)
