"""A service process: READY line, health, reflection, drain on a signal, one line when it cannot start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = textwrap.dedent("""
    import asyncio, sys
    from kadence.internal import drafter_pb2_grpc
    from services.runtime.config import ServiceConfig
    from services.runtime.host import serve
    from services.runtime.metrics import Metrics
    from services.runtime.server import GrpcServer

    class Service:
        def __init__(self, config):
            self.config, self.metrics = config, Metrics("scheduler")
        async def start(self):
            self.server = GrpcServer(self.config, self.metrics)
            self.server.add(
                drafter_pb2_grpc.add_DrafterServiceServicer_to_server,
                drafter_pb2_grpc.DrafterServiceServicer(), "kadence.internal.DrafterService")
            self.metrics_address = self.metrics.start(self.config.host, self.config.metrics_port)
            self.address = await self.server.start()
            return self.address
        async def drain(self, grace):
            print("draining", grace, flush=True)
            await self.server.drain(grace)
            if grace > 5: await asyncio.sleep(60)
        async def health(self):
            return True

    sys.exit(serve(Service, "scheduler", ServiceConfig))
""")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    child = start("--set", "scheduler.drain_seconds=0.5")
    yield child
    child.kill()
    child.communicate()


def ready(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    word, service, address, metrics = line.split()
    assert (word, service) == ("READY", "scheduler") and metrics.startswith("metrics=127.0.0.1:")
    return address


def test_serves_then_drains(process: subprocess.Popen[str]) -> None:
    with grpc.insecure_channel(ready(process)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "kadence.internal.DrafterService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        [response] = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]), timeout=5)
        names = {service.name for service in response.list_services_response.service}
        assert {"kadence.internal.DrafterService", "grpc.health.v1.Health"} <= names
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and "draining 0.5" in out, err


def test_second_signal_exits_at_once() -> None:
    child = start("--set", "scheduler.drain_seconds=30")
    try:
        ready(child)
        child.send_signal(signal.SIGINT)
        assert child.stdout is not None and child.stdout.readline().startswith("draining")
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=10) == 1
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("key", ["port", "metrics_port"])
def test_port_in_use(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        child = start("--set", f"scheduler.{key}={port}")
        out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (2, "", f"kadence: {key}: 127.0.0.1:{port} is in use\n")


def test_unknown_key_and_print_config() -> None:
    child = start("--set", "scheduler.prt=1")
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (2, "")
    assert err == 'kadence: configuration: [scheduler] unknown key prt; did you mean "port"?\n'
    child = start("--print-config", "--set", "scheduler.port=5")
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0 and out.startswith("[scheduler]\n") and "port = 5\n" in out
