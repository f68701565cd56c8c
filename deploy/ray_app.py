"""The services as Ray Serve deployments: Serve supervises the replicas, their own gRPC servers carry the data."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy import processes, ray_head
from deploy.config import SERVICES, Plan
from deploy.placement import StartError
from services.runtime import logs
from services.runtime.config import load
from services.runtime.host import Service

APPLICATION = "kadence-{}"


def build(kind: str, values: dict[str, Any]) -> Service:
    """The service object of one kind, from dotted configuration keys; imported late, as only verifiers need torch."""
    if kind == "scheduler":
        from services.scheduler.service import SchedulerService as Factory
    elif kind == "verifier":
        from services.verifier.service import VerifierService as Factory  # type: ignore[assignment]
    else:
        from services.drafter.service import DrafterService as Factory  # type: ignore[assignment]
    return Factory(load(SERVICES[kind], None, kind, values))  # type: ignore[arg-type]


class Replica:
    """Hosts one service inside a Serve replica; the same class serves every kind."""

    # Serve awaits this, which the type checker cannot know.
    async def __init__(self, kind: str, values: dict[str, Any]) -> None:  # type: ignore[misc]
        sys.setswitchinterval(0.0005)
        if values.get("cluster.host") == "node":
            import ray

            values = {f"{kind}.host": ray.util.get_node_ip_address()} | values
        config: Any = load(SERVICES[kind], None, kind, values)
        logs.setup(kind, config.log_level, config.log_format)
        self._drain_seconds = config.drain_seconds
        self._service = build(kind, values)
        await self._service.start()

    async def address(self) -> str:
        """Where its gRPC server listens."""
        return self._service.address

    async def pid(self) -> int:
        """Its process."""
        return os.getpid()

    async def check_health(self) -> None:
        """Serve calls this; it replaces a replica that raises, or that does not answer in time."""
        if not await self._service.health():
            raise RuntimeError("the service reports that it does not work")

    async def __del__(self) -> None:
        """Serve calls this before it ends the replica."""
        if hasattr(self, "_service"):
            await self._service.drain(self._drain_seconds)


class RayPlacement:
    """One Serve application per kind, on a Ray of our own or on a running one."""

    def __init__(
        self, plan: Plan, cluster_id: str, run: Path, note: Callable[..., None], say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._id = cluster_id
        self._run = run
        self._note = note  # records what must be undone, before it is done
        self._say = say
        self._ray: Any = None
        self._serve: Any = None

    def start(self, deadline: float) -> str:
        """Starts or joins Ray, deploys, returns the scheduler's address. Raises StartError."""
        joined = self._plan.cluster.ray_address or os.environ.get("RAY_ADDRESS", "")
        if joined:
            ray_head.reachable(joined)
        temp = None if joined else ray_head.folder(self._run)
        self._note(ray_temp_dir=str(temp or ""), ray_address=joined)
        address = joined or ray_head.start(temp or self._run, self._id, self._plan.cluster.verifiers)
        self._note(ray_address=address, log_dir=str(temp / "session_latest" / "logs") if temp else "")
        self._ray = ray_head.connect(address, temp)
        self._say(f"ray: {'joined' if joined else 'started'} at {address}")
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # our own lines tell the progress
        self._serve = serve
        self._note(ray_serve_is_ours=temp is not None or not ray_head.serve_runs())
        serve.start(proxy_location="Disabled")
        self._say("ray: Serve is up, deploying")
        self._deploy(["scheduler"])
        self._wait_running("scheduler", deadline)
        scheduler = serve.get_app_handle(APPLICATION.format("scheduler")).address.remote().result(timeout_s=10)
        self._deploy([kind for kind in ("drafter", "verifier") if self._plan.replicas[kind]], scheduler)
        return str(scheduler)

    def pids(self) -> dict[str, int]:
        """Ray knows its processes; the scheduler's status names them."""
        return {}

    def check(self) -> None:
        """Raises StartError if Serve has given up on a deployment."""
        for name, application in self._serve.status().applications.items():
            for kind, deployment in application.deployments.items():
                if name == APPLICATION.format(kind) and str(deployment.status.value) in ("DEPLOY_FAILED", "UNHEALTHY"):
                    raise failure(kind, deployment.message)

    def close(self) -> None:
        """Disconnects from Ray; a driver that stays connected would not survive Ray's end."""
        if self._ray is not None:
            self._ray.shutdown()

    def log(self, kind: str) -> str:
        """What Serve says of the kind's deployment."""
        application = self._serve.status().applications.get(APPLICATION.format(kind))
        return "" if application is None else "\n".join(d.message for d in application.deployments.values())[-3000:]

    def _deploy(self, kinds: list[str], scheduler: str = "") -> None:
        values = self._plan.values
        targets = []
        for kind in kinds:
            own = {f"{kind}.scheduler": scheduler} if scheduler else {}
            deployment = self._serve.deployment(Replica, name=kind, **self._options(kind))
            application = deployment.bind(kind, values | own)
            targets.append(self._serve.RunTarget(application, name=APPLICATION.format(kind), route_prefix=None))
        self._serve.run_many(targets, wait_for_applications_running=False)

    def _options(self, kind: str) -> dict[str, Any]:
        config: Any = load(SERVICES[kind], None, kind, self._plan.values)
        resources = dict(self._plan.cluster.resources.get(kind, {}))
        actor: dict[str, Any] = {
            # Placement is by named resources: our threads share the cores by turns, which a count of CPUs cannot say.
            "num_cpus": 0,
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "runtime_env": {"env_vars": processes.settings(self._plan.cluster.verifiers)},
        }
        return {
            "num_replicas": self._plan.replicas[kind],
            "ray_actor_options": actor,
            "health_check_period_s": 2.0,
            "health_check_timeout_s": 10.0,
            "graceful_shutdown_wait_loop_s": 0.1,
            "graceful_shutdown_timeout_s": config.drain_seconds + 5.0,
            "max_constructor_retry_count": 1,
        }

    def _wait_running(self, kind: str, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.check()
            application = self._serve.status().applications.get(APPLICATION.format(kind))
            if application is not None and application.status.value == "RUNNING":
                return
            time.sleep(0.1)
        raise StartError(kind, "not serving in time")


def failure(kind: str, message: str) -> StartError:
    """The error for a deployment that Serve gave up on; one that explains itself in one line is quoted alone."""
    text = reason(message)
    return StartError(kind, text, text if _own(message) else message[-3000:])


def reason(message: str) -> str:
    """The line of Serve's deployment message that says what went wrong: our own error, else its last line."""
    own = _own(message)
    if own:
        return own[-1].partition(": ")[2]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _own(message: str) -> list[str]:
    return [line.strip() for line in message.splitlines() if line.strip().startswith("kadence.errors.")]
