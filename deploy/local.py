"""Runs the services as plain detached processes of this machine: one each, or one for all."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from deploy import processes
from deploy.config import Plan, to_toml
from deploy.placement import StartError


class LocalPlacement:
    """The processes of one cluster. Nothing restarts them: use Ray where that matters."""

    def __init__(self, plan: Plan, cluster_id: str, folder: Path) -> None:
        self._plan = plan
        self._env = processes.environment(cluster_id, plan.cluster.verifiers)
        self._config = folder / "cluster.toml"
        self._logs = folder / "logs"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, deadline: float) -> str:
        """Starts everything and returns the scheduler's address; the others may still be loading.

        Raises StartError when the scheduler ends, or does not serve before `deadline` (time.monotonic).
        """
        self._config.write_text(to_toml(self._plan.values), encoding="utf-8")
        self._logs.mkdir(exist_ok=True)
        if self._plan.cluster.transport == "inproc":
            self._spawn("cluster", "deploy.inproc")
            return self._address("cluster", deadline)
        self._spawn("scheduler", "services.scheduler")
        address = self._address("scheduler", deadline)
        for kind in ("drafter", "verifier"):
            for index in range(self._plan.replicas[kind]):
                self._spawn(f"{kind}-{index}", f"services.{kind}", "--set", f"{kind}.scheduler={address}")
        return address

    def pids(self) -> dict[str, int]:
        """Process ids by replica name, the scheduler first."""
        return {name: process.pid for name, process in self._running.items()}

    def check(self) -> None:
        """Raises StartError if a process has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise StartError.of_log(name, self._logs / f"{name}.log", f"exit status {process.returncode}")

    def close(self) -> None:
        """The processes go on by themselves."""

    def log(self, kind: str) -> str:
        """The end of the log of the kind's first replica."""
        names = [name for name in self._running if name.startswith((kind, "cluster"))]
        return processes.tail(self._logs / f"{names[0]}.log") if names else ""

    def _spawn(self, name: str, module: str, *arguments: str) -> None:
        # -P: a folder named "services" where the user stands must not shadow ours.
        command = [sys.executable, "-P", "-m", module, "--config", str(self._config), *arguments]
        self._running[name] = processes.spawn(command, self._logs / f"{name}.log", self._env)

    def _address(self, name: str, deadline: float) -> str:
        log = self._logs / f"{name}.log"
        while time.monotonic() < deadline:
            for line in processes.tail(log, 1000).splitlines():
                if line.startswith("READY scheduler "):
                    return line.split()[2]
            self.check()
            time.sleep(0.05)
        raise StartError.of_log(name, log, "not serving in time")
