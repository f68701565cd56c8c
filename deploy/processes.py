"""Detached processes that belong to one cluster, found again by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from kadence.errors import ExtraMissingError
from services.runtime import threads

try:
    import psutil
except ImportError as error:
    raise ExtraMissingError("clusters need more packages: pip install 'kadence[cluster]'") from error

# Every process of a cluster, Ray's and their children included, inherits this variable. A process id can be reused
# and a name can be shared; the mark cannot, so nothing but this cluster's own processes is ever signalled.
MARK = "KADENCE_CLUSTER_ID"


def environment(cluster_id: str, replicas: int = 1) -> dict[str, str]:
    """The environment of a cluster's processes when `replicas` verifiers compute on this machine at once."""
    return {**os.environ, **settings(replicas), MARK: cluster_id, "PYTHONUNBUFFERED": "1"}


def settings(replicas: int = 1) -> dict[str, str]:
    """Variables for processes that compute: how their threads wait, and how many cores each of `replicas` gets."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // max(1, replicas)))
    return {**threads.WAITING, "OMP_NUM_THREADS": count}


def spawn(command: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts `command` in a session of its own, so that it outlives this terminal; its output goes to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def members(cluster_id: str) -> list[psutil.Process]:
    """The cluster's live processes on this machine."""
    assert cluster_id
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == cluster_id and _runs(process):
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def stop(cluster_id: str, pids: Iterable[int] | None = None, grace: float = 2.0) -> None:
    """Asks the cluster's processes (or those of them in `pids`) to end, and ends them after `grace` seconds."""
    wanted = None if pids is None else set(pids)

    def targets() -> list[psutil.Process]:
        return [process for process in members(cluster_id) if wanted is None or process.pid in wanted]

    asked = targets()
    for process in asked:
        _signal(process, "terminate")
    _wait(asked, grace)
    # Twice, because a process that is being ended may still start another one.
    for _ in range(2):
        remaining = targets()
        for process in remaining:
            _signal(process, "kill")
        _wait(remaining, 5)


def _signal(process: psutil.Process, method: str) -> None:
    with contextlib.suppress(psutil.Error):
        getattr(process, method)()


def _wait(processes: list[psutil.Process], seconds: float) -> None:
    """Waits until none of them runs. A zombie counts as ended: in a container nobody may collect it."""
    deadline = time.monotonic() + seconds
    while any(_runs(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def started(pid: int) -> float | None:
    """When process `pid` started (seconds since 1970), or None if none runs; with the pid it names one process."""
    try:
        process = psutil.Process(pid)
        return float(process.create_time()) if _runs(process) else None
    except psutil.Error:
        return None


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log; empty if there is none."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
