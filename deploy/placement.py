"""What the ways of placing a cluster have in common: their shape, and the error when one cannot start."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from deploy import processes
from kadence.errors import KadenceError


class Placement(Protocol):
    """Starts the services of one plan somewhere."""

    def start(self, deadline: float) -> str:
        """Starts everything, returns the scheduler's address. Raises StartError; `deadline` is of time.monotonic."""

    def pids(self) -> dict[str, int]:
        """Process ids known so far, by replica name."""

    def check(self) -> None:
        """Raises StartError if a replica cannot come up any more."""

    def close(self) -> None:
        """Lets go of what was started, without stopping it."""

    def log(self, kind: str) -> str:
        """The end of what one replica of the kind wrote; may be empty."""


class StartError(KadenceError):
    """A replica could not start. The message is one line; `log` is the end of what it wrote."""

    def __init__(self, replica: str, reason: str, log: str = "") -> None:
        super().__init__(f"{replica} did not start: {reason}")
        self.log = log

    @classmethod
    def of_log(cls, replica: str, path: Path, otherwise: str) -> StartError:
        """The error for a process whose log is at `path`; its own "kadence: ..." line is the reason if it wrote one."""
        log = processes.tail(path)
        own = [line for line in log.splitlines() if line.startswith("kadence: ")]
        return cls(replica, own[-1].removeprefix("kadence: ") if own else otherwise, log)
