"""Starts and joins Ray: a local, loopback-only, quiet one that belongs to us, or one that is already there."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deploy import processes
from deploy.config import free_port
from deploy.placement import StartError
from kadence.errors import ConfigError

# Ray appends about 65 characters for its sockets, whose paths may have 107.
_LONGEST_FOLDER = 38

# Made for other systems; at "0" Ray takes 127.0.0.1 as it stands instead of replacing it by the machine's address.
_STAY_LOCAL = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Ray reads these when it is imported, in the driver and in its daemons. Token authentication guards nothing on
# loopback and would write a file into the user's home.
LOCAL = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", _STAY_LOCAL: "0"}

# An idle Ray polls: with three replicas 11 % of a core as it comes, 6 % with these (most of that is fixed: the main
# thread of each worker wakes a hundred times a second). No request is slowed, as none passes through Ray; a deployment
# starts half a second later.
_QUIET = {
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}


def folder(run: Path) -> Path:
    """Where the local Ray keeps its files: in the run folder, or in a temporary one if that path is too long."""
    inside = run / "ray"
    if len(os.fsencode(inside)) <= _LONGEST_FOLDER:
        inside.mkdir()
        return inside
    return Path(tempfile.mkdtemp(prefix="kadence-ray-"))


def start(temp: Path, cluster_id: str, verifiers: int) -> str:
    """Starts the local Ray in `temp` as daemons that bear the cluster's mark; its address. Raises StartError."""
    env = processes.environment(cluster_id, verifiers) | LOCAL | _QUIET | {"RAY_TMPDIR": str(temp)}
    # The data plane is our own, so the object store gets its minimum; replicas ask for no CPUs.
    command = [
        *(sys.executable, "-P", "-m", "ray.scripts.scripts"),
        *("start", "--head", "--port=0", "--node-ip-address=127.0.0.1"),
        *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor", "--disable-usage-stats"),
        *(f"--ray-client-server-port={free_port()}", "--object-store-memory=80000000", f"--temp-dir={temp}"),
    ]
    try:
        result = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,  # a Ctrl-C is ours to handle
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError("ray", str(error)) from error
    if result.returncode != 0:
        raise StartError("ray", f"exit status {result.returncode}", (result.stdout + result.stderr)[-3000:])
    # The server for Ray's remote clients cannot be left out, only ended: nobody uses it and it holds 90 MB.
    clients = [p.pid for p in processes.members(cluster_id) if "ray.util.client.server" in p.cmdline()]
    processes.stop(cluster_id, clients)
    return (temp / "ray_current_cluster").read_text(encoding="utf-8").strip()


def reachable(address: str) -> str:
    """Checks the address of a Ray to join, since Ray itself would try for ever. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise ConfigError(f"ray_address = {address}: must be host:port of a running Ray head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"ray_address = {address}: nothing answers there ({error.strerror or error})") from error
    return address


def connect(address: str, temp: Path | None) -> Any:
    """Connects this process to Ray at `address` as a driver and returns the ray module; `temp` is set for our own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if temp is not None:
        os.environ.update(LOCAL, RAY_TMPDIR=str(temp))
    elif address.startswith("127."):
        os.environ[_STAY_LOCAL] = "0"
    import ray

    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    return ray


def serve_runs() -> bool:
    """Whether the Ray this process is connected to already has a Serve instance, which then stays when we leave."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def remove(temp: Path) -> None:
    """Deletes the local Ray's files, after its processes have ended."""
    shutil.rmtree(temp, ignore_errors=True)
