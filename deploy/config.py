"""The configuration of a whole cluster: one TOML file with a table per service, checked before anything starts."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from deploy import defaults
from kadence.errors import ConfigError
from services.drafter.config import DrafterConfig
from services.model import shipped
from services.runtime import addresses
from services.runtime.config import SHARED, Frozen, load, override, read
from services.scheduler.config import SchedulerConfig
from services.verifier.config import VerifierConfig

DEFAULT_MODEL = defaults.MODEL
_RANKING = "drafter.options.draft_vocabulary_file"
PUBLIC_PORT = 50051
HTTP_PORT = 8000
SERVICES: dict[str, type[Frozen]] = {"scheduler": SchedulerConfig, "verifier": VerifierConfig, "drafter": DrafterConfig}


class ClusterSection(Frozen):
    """How the services are placed."""

    transport: Literal["ray", "grpc", "inproc"] = "ray"
    """Replicas managed by Ray Serve, plain processes, or everything in one process."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address that services bind unless their own table sets one; "node" takes each Ray node's address."""
    verifiers: int = Field(1, ge=1, le=64)
    """Verifier replicas."""
    drafters: int = Field(1, ge=0, le=64)
    """Drafter replicas; none are started for drafter.kind "none"."""
    ray_address: str = ""
    """A running Ray to join; empty takes $RAY_ADDRESS, and without that starts a local one."""
    resources: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Ray resources asked for per replica, by service: resources.verifier = {GPU = 1}."""
    start_seconds: float = Field(180.0, gt=0, le=3600)
    """Longest wait for every replica to be ready."""


@dataclass(frozen=True)
class Plan:
    """A checked configuration, and how many replicas of each service it asks for."""

    values: dict[str, Any]
    """Every key that is set, dotted; `load(cls, None, section, values)` gives a service's configuration."""
    cluster: ClusterSection
    scheduler: SchedulerConfig
    replicas: dict[str, int]

    def with_values(self, values: Mapping[str, Any]) -> Plan:
        """The plan with further dotted keys set."""
        return _check(None, {**self.values, **values})

    def with_model(self, folder: Path) -> Plan:
        """The plan with the model's folder, and the drafter's, as services find them from anywhere.

        Raises CheckpointError if there is no such drafter.
        """
        paths = {"model.path": folder}
        if isinstance(checkpoint := self.values.get(defaults.CHECKPOINT), str) and checkpoint:
            paths[defaults.CHECKPOINT] = shipped.find_drafter(checkpoint)
        if isinstance(ranking := self.values.get(_RANKING), str) and ranking:
            paths[_RANKING] = Path(ranking).expanduser()
        return self.with_values({key: str(path.resolve()) for key, path in paths.items()})


def load_plan(path: str | Path | None, overrides: Mapping[str, Any]) -> Plan:
    """Reads the file (None: all defaults), applies dotted `overrides`, checks all tables. Raises ConfigError.

    Where nothing is said of the drafter, it is the one shipped for the model, else "ngram" (deploy/defaults.py).
    """
    given = dotted(override(read(path), overrides))
    cluster = load(ClusterSection, path, "cluster", overrides)
    values: dict[str, Any] = {"model.path": DEFAULT_MODEL, **defaults.drafting(given)}
    if cluster.host != "node":
        values |= {f"{service}.host": cluster.host for service in SERVICES}
    return _check(path, values | given)


def _check(path: str | Path | None, values: dict[str, Any]) -> Plan:
    cluster = load(ClusterSection, path, "cluster", values)
    configs = {service: load(cls, path, service, values) for service, cls in SERVICES.items()}
    scheduler, drafter = configs["scheduler"], configs["drafter"]
    assert isinstance(scheduler, SchedulerConfig) and isinstance(drafter, DrafterConfig)
    drafters = 0 if drafter.kind == "none" else cluster.drafters
    return Plan(values, cluster, scheduler, {"scheduler": 1, "verifier": cluster.verifiers, "drafter": drafters})


def dotted(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def show_plan(plan: Plan) -> str:
    """The whole resolved configuration as TOML that `load_plan` would read back."""
    sections: dict[str, dict[str, Any]] = {"cluster": plan.cluster.model_dump(mode="json")}
    for service, cls in SERVICES.items():
        tables = load(cls, None, service, plan.values).model_dump(mode="json")
        sections |= {name: tables.pop(name) for name in SHARED if name in tables}
        sections[service] = tables
    return to_toml(dotted(sections))


def to_toml(values: Mapping[str, Any]) -> str:
    """Dotted keys as a TOML file."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())


def public_port(plan: Plan) -> int:
    """The scheduler's port: the configured one, else 50051, else any that is free. Raises ConfigError."""
    if plan.cluster.host == "node":  # another machine's port; its service says if it is taken
        return plan.scheduler.port or PUBLIC_PORT
    return _chosen("port", plan.scheduler.host, plan.scheduler.port, PUBLIC_PORT)


def http_port(plan: Plan) -> int:
    """The HTTP API's port: the configured one, else 8000, else any that is free; -1 if it is off. Raises ConfigError.

    On another machine nobody can look, and 8000 is often taken: there the service takes any that is free.
    """
    asked = plan.scheduler.http_port
    if asked < 0 or plan.cluster.host == "node":
        return asked
    return _chosen("http_port", plan.scheduler.host, asked, HTTP_PORT)


def _chosen(key: str, host: str, asked: int, wanted: int) -> int:
    addresses.free("[scheduler] host", host, 0)
    if asked:
        addresses.free(f"[scheduler] {key}", host, asked)
        return asked
    try:
        addresses.free(f"[scheduler] {key}", host, wanted)
        return wanted
    except ConfigError:
        return free_port(host.strip("[]"))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((host, 0), family=family) as probe:
        return int(probe.getsockname()[1])
