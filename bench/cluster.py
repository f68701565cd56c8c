"""Starts and stops whole clusters of any form for measurements, apart from any cluster of the user's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from deploy import processes
from deploy.config import DEFAULT_MODEL
from deploy.placement import StartError
from kadence import AsyncClient, ClusterStatus, ReplicaStatus
from services.model.fetch import resolve


@dataclass(frozen=True)
class Running:
    """A cluster that serves."""

    endpoint: str
    cluster_id: str

    def processes(self) -> list[psutil.Process]:
        """Every process that belongs to it, Ray's own included."""
        return processes.members(self.cluster_id)


@contextmanager
def running(transport: str, values: Mapping[str, Any] | None = None) -> Iterator[Running]:
    """A cluster of `kadence up`: "grpc" is three processes, "inproc" is one, "ray" has Ray's besides.

    `values` are configuration keys ("policy.name"). Raises StartError if it does not come up.
    """
    folder = resolve(DEFAULT_MODEL, allow_fetch=True).resolve()
    options = {"model.path": str(folder), **(values or {})}
    sets = [text for key, value in options.items() for text in ("--set", f"{key}={json.dumps(value)}")]
    with tempfile.TemporaryDirectory(prefix="kadence-bars-") as home:
        try:
            _command(home, "up", "--transport", transport, *sets)
            record = json.loads((Path(home) / "cluster.json").read_text(encoding="utf-8"))
            yield Running(record["endpoint"], record["cluster_id"])
        finally:
            _command(home, "down")


def _command(home: str, *arguments: str) -> None:
    """Runs `kadence ...` with its record and files in `home`, so that it meets no other cluster."""
    command = [sys.executable, "-P", "-m", "kadence.cli", *arguments]
    env = {**os.environ, "KADENCE_HOME": home}
    result = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )
    if result.returncode != 0:
        print(result.stderr, file=sys.stderr)
        raise StartError(f"kadence {arguments[0]}", f"exit status {result.returncode}", result.stderr)


async def idle_verifier(client: AsyncClient) -> ReplicaStatus:
    """The first verifier once it reports that it is idle: reports are rate-limited, the last may be on its way."""
    for _ in range(20):
        verifier = next(replica for replica in (await client.status()).replicas if replica.kind == "verifier")
        if not verifier.running and not verifier.waiting and not verifier.kv_pages_used:
            break
        await asyncio.sleep(0.25)
    return verifier


def pid_of(status: ClusterStatus, kind: str) -> int:
    """Process id of the first replica of that kind."""
    return next(replica.pid for replica in status.replicas if replica.kind == kind)


def resident(pid: int, field: str = "VmRSS") -> int:
    """Bytes of memory that are resident now ("VmRSS"), or were at most since the start ("VmHWM")."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def metric(status: ClusterStatus, kind: str, name: str) -> float:
    """Sum of a metric's samples on the first replica of that kind; 0 if it has none."""
    address = next(replica.metrics_address for replica in status.replicas if replica.kind == kind)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this very machine
    with opener.open(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
