"""Brings one cluster up and down, and leaves nothing behind, also after a crash half-way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy import defaults, processes, ray_head, readiness
from deploy.config import Plan, http_port, public_port
from deploy.local import LocalPlacement
from deploy.placement import Placement
from kadence import _state
from kadence.errors import ConfigError
from services.model.fetch import resolve

Say = Callable[[str], None]
_STARTING = {
    "ray": "starting Ray, and the services on it",
    "grpc": "starting the services as processes",
    "inproc": "starting one process for all services",
}


def up(plan: Plan, say: Say) -> dict[str, Any]:
    """Starts the cluster, waits until every replica serves, returns its record. On any error all is undone.

    Raises ConfigError (one is running, a port is taken), CheckpointError, StartError.
    """
    _forget_dead(say)
    run = _state.home() / "run"
    record: dict[str, Any] = {
        "phase": "starting",
        "cluster_id": uuid.uuid4().hex,
        "transport": plan.cluster.transport,
        "endpoint": "",
        "http": "",
        "pids": {},
        "run_dir": str(run),
        "log_dir": str(run / "logs"),
        "owner": [os.getpid(), processes.started(os.getpid())],
    }
    _claim(record)
    try:
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        return _start(plan, record, run, say)
    except BaseException:
        if any(record.get(key) for key in ("pids", "ray_temp_dir", "ray_address")):
            say("stopping what had started")
        undo(record)
        raise


def _start(plan: Plan, record: dict[str, Any], run: Path, say: Say) -> dict[str, Any]:
    def note(**fields: Any) -> None:
        record.update(fields)
        _state.write_state(record)

    model = plan.values["model.path"]
    say(f"model {model}")
    folder = resolve(model, allow_fetch=True)
    ports = {"scheduler.port": public_port(plan), "scheduler.http_port": http_port(plan)}
    say(drafting(plan))
    plan = plan.with_model(folder).with_values(ports)
    deadline = time.monotonic() + plan.cluster.start_seconds
    say(_STARTING[plan.cluster.transport])
    placement: Placement
    if plan.cluster.transport == "ray":
        from deploy.ray_app import RayPlacement

        placement = RayPlacement(plan, record["cluster_id"], run, note, say)
    else:
        placement = LocalPlacement(plan, record["cluster_id"], run)
    try:
        endpoint = placement.start(deadline)
        note(endpoint=endpoint, pids=placement.pids())
        status = readiness.wait(endpoint, plan.replicas, placement, deadline, say)
        note(phase="running", http=next((r.http_address for r in status.replicas if r.http_address), ""))
    finally:
        note(pids=placement.pids())
        placement.close()
    return record


def drafting(plan: Plan) -> str:
    """Who drafts and how much is verified, in one line."""
    checkpoint = plan.values.get(defaults.CHECKPOINT)
    of = f" {checkpoint}" if checkpoint else ""
    return f"drafter {plan.values[defaults.KIND]}{of}, policy {plan.scheduler.policy.name}"


def down(say: Say) -> bool:
    """Stops the recorded cluster and removes its files; False if there is none. Safe to repeat at any point."""
    record = _record()
    if record is None:
        return False
    _stop_starter(record, say)
    say(f"stopping the cluster at {record.get('endpoint') or 'an endpoint not yet known'}")
    undo(record)
    return True


def undo(record: dict[str, Any]) -> None:
    """Ends all that the record names, gracefully if possible, then for certain; then its files, the record last."""
    cluster_id = record["cluster_id"]
    if record.get("ray_address"):
        _leave_ray(record)
    for kind in ("scheduler", "cluster", "verifier", "drafter"):
        pids = [pid for name, pid in record["pids"].items() if name.partition("-")[0] == kind]
        if pids:
            processes.stop(cluster_id, pids, grace=15.0)
    processes.stop(cluster_id)
    if record.get("ray_temp_dir"):
        ray_head.remove(Path(record["ray_temp_dir"]))
    shutil.rmtree(record["run_dir"], ignore_errors=True)
    _state.remove_state()
    with contextlib.suppress(OSError):
        _state.home().rmdir()  # only if nothing else, such as a model, is in it


def _leave_ray(record: dict[str, Any]) -> None:
    """Drains and deletes our Serve applications; a Ray that does not answer is not waited for."""
    temp = record.get("ray_temp_dir", "")
    if temp and not processes.members(record["cluster_id"]):
        return
    # On our own Ray, Serve ends with it.
    whole = "serve" if record.get("ray_serve_is_ours") and not temp else ""
    command = [sys.executable, "-P", "-m", "deploy.ray_stop", record["ray_address"], temp, whole]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)


def _claim(record: dict[str, Any]) -> None:
    """Writes the record if there is none, as one step, so that two `kadence up` cannot both start."""
    path = _state.state_path()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path.parent}: cannot be written: {error.strerror}") from error
    try:
        os.link(draft, path)
    except FileExistsError:
        raise ConfigError(f"a cluster is being started already ({path}); `kadence down` stops it") from None
    finally:
        draft.unlink()


def _record() -> dict[str, Any] | None:
    """The record of the cluster there is, if any. Raises ConfigError if it is none of ours."""
    record = _state.read_state()
    if record is not None and not {"owner", "phase", "cluster_id"} <= record.keys():
        raise ConfigError(f"{_state.state_path()}: not the record of a cluster; remove it if none runs")
    return record


def _forget_dead(say: Say) -> None:
    """Refuses if a cluster runs; cleans up after one whose processes are all gone."""
    record = _record()
    if record is None:
        return
    joined = record.get("ray_address") and not record.get("ray_temp_dir")
    if joined or _starter_lives(record) or processes.members(record["cluster_id"]):
        where = f" at {record['endpoint']}" if record.get("endpoint") else ""
        raise ConfigError(f"a cluster is running already{where}; stop it with `kadence down`")
    say("cleaning up after a cluster that ended by itself")
    undo(record)


def _starter_lives(record: dict[str, Any]) -> bool:
    pid, started = record["owner"]
    return record["phase"] == "starting" and pid != os.getpid() and processes.started(pid) == started


def _stop_starter(record: dict[str, Any], say: Say) -> None:
    """Interrupts a `kadence up` that is still at work, and waits while it undoes what it did."""
    if not _starter_lives(record):
        return
    say("interrupting the `kadence up` that is starting it")
    pid, _ = record["owner"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)  # not SIGINT, which a shell makes its background jobs ignore
    deadline = time.monotonic() + 60
    while _starter_lives(record) and time.monotonic() < deadline:
        time.sleep(0.1)
