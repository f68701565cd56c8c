"""Measures one capability in a process of its own, so that none disturbs the next and none outstays its time."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.bars.groups import Capability
from deploy import processes

_UNWIND_SECONDS = 90  # a measurement that is stopped takes its clusters down first


def measure(capability: Capability, bench: Bench, deadline: float) -> Iterator[Bar]:
    """Yields the capability's bars; if it fails or runs past `deadline` (time.monotonic), one that says so."""
    os.environ.update(processes.settings())  # what computes here computes as the services do
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, capability.module, bench))
    process.start()
    sender.close()
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            yield receiver.recv()
        yield Bar("finished", None, note="not within the time for all bars")
    except EOFError:
        pass  # all is measured
    finally:
        _stop(process)


def _stop(process: multiprocessing.process.BaseProcess) -> None:
    if process.is_alive():
        process.join(1)
    if process.is_alive():
        process.terminate()
        process.join(_UNWIND_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def interrupt_once() -> None:
    """Makes the first SIGINT or SIGTERM raise KeyboardInterrupt, and nothing disturb the clean-up that follows."""

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        signal.signal(number, interrupt)


def _child(sender: Connection, module: str, bench: Bench) -> None:
    interrupt_once()

    async def send_all() -> int:
        count = 0
        async for bar in importlib.import_module(module).measure(bench):
            sender.send(bar)
            count += 1
        return count

    try:
        if not asyncio.run(send_all()):
            sender.send(Bar("measured", None, note="it measured nothing"))
    except KeyboardInterrupt:
        pass
    except Exception as error:
        traceback.print_exc()
        reason = str(error).partition("\n")[0]
        sender.send(Bar("measured", None, note=f"{type(error).__name__}: {reason}"))
