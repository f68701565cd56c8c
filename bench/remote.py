"""The reference model in a process of its own, which sleeps while it is not asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.child import child
from services.runtime.threads import WAITING

# How idle OpenMP threads wait is fixed when a process starts; these names decide it, and the number of threads.
_OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
WAITS: dict[str, dict[str, str]] = {
    "threads wait as the services' do": WAITING,
    "threads wait as torch has them": {},
}


class Remote:
    """Calls methods of bench.reference.Reference over there."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result. Raises RuntimeError with the reason if it fails there, EOFError if the process ended."""
        self._pipe.send((method, arguments))
        error, result = self._pipe.recv()
        if error:
            raise RuntimeError(f"reference model: {error}")
        return result


@contextmanager
def remote(folder: Path, wait: str) -> Iterator[Remote]:
    """A process with the reference model of `folder`, its threads waiting as WAITS[wait] says."""
    before = {name: os.environ.pop(name) for name in _OPENMP if name in os.environ}
    os.environ.update(WAITS[wait])
    with ExitStack() as stack:
        try:
            pipe = stack.enter_context(child(_serve, folder))
        finally:
            for name in _OPENMP:
                os.environ.pop(name, None)
            os.environ.update(before)
        yield Remote(pipe)


def _serve(pipe: Connection, folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker decides when this ends
    from bench.reference import Reference

    reference = Reference(folder)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        answer: tuple[str | None, Any]
        try:
            answer = (None, getattr(reference, method)(*arguments))
        except Exception as error:
            answer = (f"{type(error).__name__}: {error}", None)
        pipe.send(answer)
