"""How OpenMP's threads wait in processes that compute. Must be set before torch is imported."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# A step is a chain of short parallel regions. Threads that sleep at once pay a wake-up for each (measured: twice the
# step); threads that spin for ever steal the core from peers that work between steps. Spin through a step, no longer.
WAITING = {"GOMP_SPINCOUNT": "10000"}


def set_waiting() -> None:
    """Applies WAITING to this process, where the user has not chosen otherwise."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)


def available() -> int:
    """Compute threads this process may use: what OMP_NUM_THREADS says, else one per core it may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else len(os.sched_getaffinity(0))


def in_passing(function: Callable[[], T]) -> T:
    """Calls `function` in a thread that then ends, and returns or raises what it does.

    For computing that is not the engine's: OpenMP keeps a team of workers for every living thread that ever computed,
    and once there are more than cores it lets all of them sleep at once (measured: 1.5 times the step).
    """
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="in-passing")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
