"""A verifier replica: from configuration to a loaded, served, attached engine, and back to nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import torch

from kadence.errors import ConfigError
from kadence.internal import common_pb2, control_pb2, verifier_pb2_grpc
from services.model.fetch import resolve
from services.runtime import identity, threads
from services.runtime.attach import Attachment
from services.runtime.inproc import InprocServer
from services.runtime.metrics import Metrics
from services.runtime.server import MAX_MESSAGE_BYTES, GrpcServer
from services.verifier import messages
from services.verifier.config import VerifierConfig
from services.verifier.drafter_link import DrafterLink, Side
from services.verifier.drafting import Drafting
from services.verifier.engine import Engine, Limits
from services.verifier.metrics import VerifierMetrics
from services.verifier.outcomes import StepReport
from services.verifier.planning import PrefillBudget
from services.verifier.servicer import VerifierServicer
from services.verifier.target import Target

NAME = "kadence.internal.VerifierService"
_HUNG_SECONDS = 30.0
_ATTENTION_PRICE = 2  # time of a multiplication in attention to one in a linear layer; 1.6 to 3.5 on CPUs

_log = logging.getLogger(__name__)


class VerifierService:
    """`inproc_name` serves under that name inside this process instead of on a port."""

    def __init__(self, config: VerifierConfig, *, inproc_name: str | None = None) -> None:
        self._config = config
        self._metrics = Metrics("verifier")
        self._verifier_metrics = VerifierMetrics(self._metrics.registry)
        self._server = InprocServer(inproc_name) if inproc_name else GrpcServer(config, self._metrics)
        self._attachment: Attachment | None = None
        self._replica_id = identity.replica_id("verifier")
        self.address = ""
        self.metrics_address = ""

    async def start(self) -> str:
        """Loads the model, serves, attaches; returns the address. Raises ConfigError or CheckpointError."""
        config = self._config
        self._loop = asyncio.get_running_loop()
        folder = resolve(config.model.path)
        self._link = DrafterLink(lambda: self._side, config.heartbeat_seconds, lambda: self._engine.report())
        target = await asyncio.to_thread(threads.in_passing, lambda: self._build(folder))
        self._description = self._describe(config.model.name or folder.name, target)
        self._side = Side(self._description, target.arch.num_layers, target.arch.hidden_size)
        self._servicer = VerifierServicer(
            self._engine, self._description, config.heartbeat_seconds, config.grace_seconds
        )
        self._server.add(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, self._servicer, NAME)
        self.metrics_address = self._metrics.start(config.host, config.metrics_port)
        self.address = await self._server.start()
        self._link.start()
        self._engine.start()
        if config.scheduler:
            self._attachment = Attachment(
                config.scheduler,
                self._register,
                on_policy=lambda policy: self._engine.set_policy(messages.policy_from(policy)),
                on_drafters=lambda peers: self._link.set_peers([(p.replica_id, p.address) for p in peers.peers]),
            )
            await self._attachment.start()
        self._engine.report()
        _log.info("%s", banner(target, self._limits, self._engine.attention))
        return self.address

    def _build(self, folder: Path) -> Target:
        """Everything that computes before the engine's thread does."""
        config = self._config
        torch.set_num_threads(config.threads or threads.available())
        target = Target(folder, config.model.dtype)
        self._limits = resolve_limits(config, target)
        check_memory(config, target, self._limits)
        target.prepare(self._limits.max_model_len)
        target.warm(self._limits.max_num_batched_tokens)
        self._drafting = Drafting(self._link, target.arch.vocab_size)
        self._engine = Engine(target, self._limits, self._drafting, self._on_step)
        return target

    async def drafting(self) -> None:
        """Waits until requests that come from now on are drafted for. Raises ConfigError if a drafter does not fit."""
        await self._link.connected()

    async def drain(self, grace: float) -> None:
        """Takes no new requests, gives running ones `grace` seconds, stops."""
        self._servicer.draining = True
        if self._attachment is not None:
            self._attachment.drain()
        await self._server.set_serving(False)
        end = time.monotonic() + grace
        while self._engine.busy and time.monotonic() < end:  # noqa: ASYNC110 - the engine is a thread
            await asyncio.sleep(0.05)
        if self._attachment is not None:
            await self._attachment.close()
        await self._server.drain(0)
        await self._servicer.close()
        await self._link.close()
        await asyncio.to_thread(self._engine.close)
        self._metrics.close()

    async def health(self) -> bool:
        """Whether the engine comes round."""
        return bool(self.address) and (not self._engine.busy or time.monotonic() - self._engine.beat < _HUNG_SECONDS)

    def _on_step(self, report: StepReport) -> None:
        """In the engine's thread: hands the step over to the event loop."""
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        self._servicer.deliver(report.step, report.updates)
        self._verifier_metrics.observe(report, self._drafting.counters)
        if self._attachment is not None:
            drafter, problem = self._link.state
            self._attachment.report_load(messages.load_message(report.load, drafter, problem))

    def _register(self) -> control_pb2.Register:
        return control_pb2.Register(
            description=self._description,
            address=self.address,
            metrics_address=self.metrics_address,
            pid=os.getpid(),
            held_policy=messages.policy_message(self._engine.policy),
        )

    def _describe(self, name: str, target: Target) -> common_pb2.Description:
        limits = self._limits
        return common_pb2.Description(
            kind="verifier",
            replica_id=self._replica_id,
            model_fingerprint=target.fingerprint,
            model=name,
            vocab_size=target.arch.vocab_size,
            max_sessions=limits.max_num_seqs,
            max_rows=limits.max_num_batched_tokens,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_model_len=limits.max_model_len,
            version=identity.version(),
        )


def resolve_limits(config: VerifierConfig, target: Target) -> Limits:
    """The configuration's bounds with the model's filled in. Raises ConfigError where they contradict."""
    num_pages = config.kv_tokens // config.page_size
    if num_pages < 1:
        raise ConfigError(f"[verifier] kv_tokens = {config.kv_tokens}: must be at least page_size, {config.page_size}")
    kv_tokens = num_pages * config.page_size
    longest = config.max_model_len or min(target.arch.max_position, kv_tokens)
    if longest > target.arch.max_position:
        raise ConfigError(
            f"[verifier] max_model_len = {longest}: the model's positions end at {target.arch.max_position}"
        )
    if longest > kv_tokens:
        raise ConfigError(f"[verifier] max_model_len = {longest}: kv_tokens holds only {kv_tokens}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"[verifier] max_num_batched_tokens = {config.max_num_batched_tokens}: must be at least max_num_seqs, "
            f"{config.max_num_seqs}"
        )
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        max_model_len=longest,
        num_pages=num_pages,
        page_size=config.page_size,
        draft_deadline_seconds=config.draft_deadline_seconds,
        prefill=PrefillBudget(config.max_prefill_tokens, target.arch.keys_per_row / _ATTENTION_PRICE),
        prefix_caching=config.prefix_caching,
    )


def check_memory(config: VerifierConfig, target: Target, limits: Limits) -> None:
    """Raises ConfigError if the KV alone is more than the machine has; the system would only say so when it is used."""
    need = limits.num_pages * limits.page_size * target.arch.kv_bytes_per_token(target.dtype.itemsize)
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > have:
        raise ConfigError(
            f"[verifier] kv_tokens = {config.kv_tokens}: takes {need / 2**30:.0f} GiB of KV, "
            f"the machine has {have / 2**30:.0f} GiB"
        )


def banner(target: Target, limits: Limits, attention: str) -> str:
    """One line with everything that bounds the engine."""
    per_token = target.arch.kv_bytes_per_token(target.dtype.itemsize)
    tokens = limits.num_pages * limits.page_size
    return (
        f"{target.arch.family} {target.arch.num_layers} layers, {str(target.dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads, {attention} attention; "
        f"KV {tokens} tokens in {limits.num_pages} pages of {limits.page_size} "
        f"({tokens * per_token / 2**20:.0f} MiB); max_num_seqs {limits.max_num_seqs}, "
        f"max_num_batched_tokens {limits.max_num_batched_tokens}, max_prefill_tokens {limits.prefill.rows}, "
        f"max_model_len {limits.max_model_len}, prefix caching {'on' if limits.prefix_caching else 'off'}"
    )
