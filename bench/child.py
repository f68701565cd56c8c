"""A process of its own for what must not share one with the rest of a measurement."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Runs `target(pipe, *arguments)` over there and yields our end of the pipe; it ends when that is closed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
