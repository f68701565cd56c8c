"""Runs a whole cluster in one process and one event loop; only clients come in over gRPC or HTTP."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

from deploy.config import Plan, load_plan
from deploy.placement import StartError
from kadence.errors import KadenceError
from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.runtime import logs
from services.runtime.config import load
from services.runtime.host import Service
from services.scheduler.service import SchedulerService
from services.verifier.config import VerifierConfig
from services.verifier.service import VerifierService


class InprocCluster:
    """Scheduler, drafters and verifiers as objects; `async with` starts and drains them. `endpoint` is for clients."""

    def __init__(self, plan: Plan, name: str = "kadence") -> None:
        self._plan = plan
        self._name = name
        self.services: list[Service] = []
        self.endpoint = ""
        self.http = ""
        """Address of the HTTP API; empty if it is off."""

    async def __aenter__(self) -> InprocCluster:
        try:
            await self._start()
        except BaseException:
            await self.drain(0)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain(self._plan.scheduler.drain_seconds)

    async def _start(self) -> None:
        values = self._plan.values
        scheduler = SchedulerService(self._plan.scheduler, inproc_name=f"{self._name}-scheduler")
        await scheduler.start()
        self.services.append(scheduler)
        self.endpoint, self.http = scheduler.address, scheduler.http_address
        replicas: list[Any] = []
        for index in range(self._plan.replicas["drafter"]):
            config = load(DrafterConfig, None, "drafter", values | {"drafter.scheduler": self._inner("scheduler")})
            replicas.append(DrafterService(config, inproc_name=f"{self._name}-drafter-{index}"))
        for index in range(self._plan.replicas["verifier"]):
            verifier = load(VerifierConfig, None, "verifier", values | {"verifier.scheduler": self._inner("scheduler")})
            replicas.append(VerifierService(verifier, inproc_name=f"{self._name}-verifier-{index}"))
        for replica in replicas:
            await replica.start()
            self.services.append(replica)
        if self._plan.replicas["drafter"]:
            await self._drafting([replica for replica in replicas if isinstance(replica, VerifierService)])

    async def _drafting(self, verifiers: list[VerifierService]) -> None:
        """Waits until the first request will be drafted for. Raises ConfigError, or StartError when time is up."""
        try:
            async with asyncio.timeout(self._plan.cluster.start_seconds):
                for verifier in verifiers:
                    await verifier.drafting()
        except TimeoutError:
            raise StartError("verifier", "it found no drafter in time") from None

    def _inner(self, service: str) -> str:
        return f"inproc://{self._name}-{service}"

    async def drain(self, grace: float) -> None:
        """Drains the services in the order they started: the scheduler first, since it brings the work."""
        failed: Exception | None = None
        for service in self.services:
            try:
                await service.drain(grace)
            except Exception as error:  # the others end all the same
                failed = failed or error
        self.services.clear()
        if failed is not None:
            raise failed


def main(argv: list[str] | None = None) -> int:
    """`python -m deploy.inproc --config FILE`: serves until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m deploy.inproc", description="Runs a whole cluster in one process.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; defaults without")
    arguments = parser.parse_args(argv)
    try:
        plan = load_plan(arguments.config, {})
        logs.setup("cluster", plan.scheduler.log_level, plan.scheduler.log_format)
        sys.setswitchinterval(0.0005)
        asyncio.run(_serve(plan))
    except KadenceError as error:
        print(f"kadence: {error}", file=sys.stderr)
        return 2
    return 0


async def _serve(plan: Plan) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with InprocCluster(plan) as cluster:
        metrics = cluster.services[0].metrics_address
        print(f"READY scheduler {cluster.endpoint} metrics={metrics} http={cluster.http}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
