"""The scheduler as one service: builds its parts, starts and stops them."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter

from kadence.internal import common_pb2, control_pb2_grpc
from kadence.v1 import inference_pb2_grpc
from services.model.fetch import resolve
from services.runtime import identity
from services.runtime.inproc import InprocServer
from services.runtime.metrics import Metrics
from services.runtime.server import GrpcServer
from services.scheduler import messages, policy
from services.scheduler.config import SchedulerConfig
from services.scheduler.control import ControlServicer
from services.scheduler.dispatch import Dispatcher
from services.scheduler.fleet import Description, Fleet, Load, Replica
from services.scheduler.gateway import InferenceServicer
from services.scheduler.generation import Intake
from services.scheduler.generation_defaults import GenerationDefaults
from services.scheduler.http.app import Api
from services.scheduler.http.edge import Edge
from services.scheduler.http.metrics import HttpMetrics
from services.scheduler.http.server import HttpServer
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.model_folder import ModelFolder
from services.scheduler.prompts import Prompts
from services.scheduler.publisher import Publisher
from services.scheduler.request import MAX_ANSWERS, Limits
from services.scheduler.tokenizer import Tokenizer

_SERVICES = (
    (inference_pb2_grpc.add_InferenceServiceServicer_to_server, "kadence.v1.InferenceService"),
    (control_pb2_grpc.add_ControlServiceServicer_to_server, "kadence.internal.ControlService"),
)
_LINGER_SECONDS = 30.0
"""How long a client may go on reading an answer whose request's time is up."""
_MORE_HTTP_REQUESTS = 64
"""Beyond those that may run or wait, so that it is admission that refuses."""


class SchedulerService:
    """The scheduler. It always opens its gRPC port, since clients come in over gRPC; `inproc_name` makes it reachable
    for replicas of the same process too, as "inproc://name".
    """

    def __init__(self, config: SchedulerConfig, *, inproc_name: str | None = None) -> None:
        self._config = config
        self._id = identity.replica_id("scheduler")
        path = resolve(config.model.path)
        self._folder = ModelFolder.read(path)
        self._defaults = self._folder.defaults if config.generation_defaults else GenerationDefaults()
        self._model = config.model.name or path.resolve().name
        self._tokenizer = Tokenizer(self._folder)
        self._max_prompt_bytes = self._tokenizer.max_prompt_bytes(self._folder.max_model_len)
        self._fleet = Fleet(self._model, self._folder.vocab_size)
        self._inproc = InprocServer(inproc_name) if inproc_name else None
        self._metrics = Metrics("scheduler", {"model_name": self._model})
        self._http: HttpServer | None = None
        self._draining = False
        self.address = ""
        self.http_address = ""
        self.metrics_address = ""

    async def start(self) -> str:
        """Serves; returns the public address. Raises ConfigError if a port is taken."""
        config, metrics = self._config, SchedulerMetrics(self._metrics.registry)
        if config.http_port >= 0:
            self._http = HttpServer(config.host, config.advertise, config.http_port)
        self._prompts = Prompts(self._tokenizer, self._defaults, self._limits)
        self._dispatcher = Dispatcher(
            metrics,
            max_queue=config.max_queue,
            max_in_flight=config.max_in_flight,
            attach_wait=config.attach_wait_seconds,
        )
        publisher = Publisher(policy.parse(config.policy.name), time.time_ns(), metrics.set_epoch)
        self._intake = Intake(
            self._prompts,
            self._tokenizer,
            self._limits,
            self._dispatcher,
            metrics,
            default_timeout=config.default_timeout_seconds,
            max_chunks_per_second=config.max_chunks_per_second,
        )
        gateway = InferenceServicer(self._intake, self._dispatcher, self._fleet, publisher, self._ourselves)
        self._control = ControlServicer(
            self._fleet, publisher, self._dispatcher, metrics, self._describe, config.heartbeat_seconds
        )
        metrics.watch(lambda: self._dispatcher.running, lambda: self._dispatcher.queued, self._count_replicas)
        self._server = GrpcServer(config, self._metrics)
        for server in (self._server, self._inproc):
            for (register, name), servicer in zip(_SERVICES, (gateway, self._control), strict=True):
                if server is not None:
                    server.add(register, servicer, name)
        self.metrics_address = self._metrics.start(config.host, config.metrics_port)
        self.address = await self._server.start()
        if self._inproc is not None:
            await self._inproc.start()
        if self._http is not None:
            await self._http.start(self._http_app())
            self.http_address = self._http.address
        return self.address

    async def drain(self, grace: float) -> None:
        """Refuses new requests, gives running ones `grace` seconds, ends those that are left, stops."""
        if self.address and not self._draining:
            self._draining = True
            self._intake.close()
            await self._server.set_serving(False)
            await self._dispatcher.drained(grace)
            await self._control.close()
            servers = [server for server in (self._server, self._inproc) if server is not None]
            # What is left is to flush the last messages of calls that have ended.
            stops = [server.drain(1.0) for server in servers]
            await asyncio.gather(*stops, *([self._http.stop()] if self._http is not None else []))
            self._prompts.close()
        self._metrics.close()

    async def health(self) -> bool:
        """Whether it serves; that this is answered at all shows that its loop turns."""
        return bool(self.address) and not self._draining

    def _http_app(self) -> Edge:
        config = self._config
        api = Api(
            self._intake,
            self._tokenizer,
            self._fleet.drafter_kind,
            lambda: not self._draining,
            created=int(time.time()),
            longest=config.default_timeout_seconds + _LINGER_SECONDS,
        )
        most = config.max_queue + config.max_in_flight + _MORE_HTTP_REQUESTS
        return Edge(api.app(), HttpMetrics(self._metrics.registry), most)

    def _limits(self) -> Limits:
        folder = self._folder
        return Limits(
            model=self._model,
            vocab_size=folder.vocab_size,
            max_model_len=self._fleet.max_model_len(folder.max_model_len),
            max_prompt_bytes=self._max_prompt_bytes,
            default_max_tokens=self._defaults.max_tokens or self._config.default_max_tokens,
            max_answers=min(MAX_ANSWERS, self._config.max_queue + self._config.max_in_flight),
            eos_token_ids=folder.eos_token_ids,
        )

    def _describe(self) -> common_pb2.Description:
        return messages.ourselves(self._id, self._limits(), identity.version())

    def _ourselves(self) -> Replica:
        return Replica(
            Description("scheduler", self._id, model=self._model),
            address=self.address,
            metrics_address=self.metrics_address,
            http_address=self.http_address,
            pid=os.getpid(),
            state="draining" if self._draining else "ready",
            load=Load(running=self._dispatcher.running, waiting=self._dispatcher.queued),
        )

    def _count_replicas(self) -> dict[tuple[str, str], int]:
        return dict(Counter((replica.kind, replica.state) for replica in self._fleet.all(time.monotonic())))
