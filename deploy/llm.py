"""A cluster in a background thread of this process, for `kadence.cluster.LLM`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
import uuid
import weakref
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from services.runtime.threads import set_waiting

set_waiting()  # before torch is imported

from deploy.config import Plan, dotted, load_plan  # noqa: E402
from deploy.inproc import InprocCluster  # noqa: E402
from kadence import AsyncClient, RequestCancelledError  # noqa: E402
from services.model.fetch import resolve  # noqa: E402

T = TypeVar("T")
_LEVEL = logging.ERROR - 1  # errors only, and a level that nobody else sets
# Nobody else waits for this cluster: it refuses nothing, and time is limited by the caller alone. Nothing listens but
# the gRPC port, which its own client comes in by.
_QUIET: dict[str, Any] = {
    "scheduler.max_queue": 100_000,
    "scheduler.metrics_port": -1,
    "scheduler.http_port": -1,
    "verifier.metrics_port": -1,
    "drafter.metrics_port": -1,
}
_PATIENCE_SECONDS = 30 * 86_400.0

_open: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """A cluster of `config` (tables, or dotted keys, of a configuration file) that serves until `close`.

    `client` belongs to its loop; `run` brings work there. Raises ConfigError or CheckpointError.
    """

    client: AsyncClient

    def __init__(self, config: Mapping[str, Any]) -> None:
        plan = load_plan(None, _QUIET | dotted(config))
        plan = plan.with_model(resolve(plan.values["model.path"], allow_fetch=True))
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._work: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve(plan))
        # A daemon, since the interpreter waits for any other thread before it lets us end it.
        self._thread = threading.Thread(target=self._main, name="kadence-llm", daemon=True)
        _open.add(self)
        _quiet()
        self._thread.start()
        try:
            self._started.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it in the cluster's loop and waits; returns or raises what it does. Ctrl-C cancels it.

        Raises RequestCancelledError if the cluster is closed meanwhile.
        """
        assert threading.current_thread() is not self._thread, "the cluster's loop cannot wait for itself"
        future = asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RequestCancelledError("the cluster was closed") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what runs, stops the services, ends the thread. Safe to call twice."""
        _open.discard(self)
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._serving.cancel)
        if threading.current_thread() is not self._thread:  # the garbage collector calls from any thread
            self._thread.join()
        _quiet()

    def _main(self) -> None:
        # The engine computes in this process; with Python's 5 ms the loop would get its turn late.
        sys.setswitchinterval(min(0.0005, sys.getswitchinterval()))
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._served())

    async def _served(self) -> None:
        """Ends with the cluster; hands over why it did not start."""
        try:
            await self._serving
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self, plan: Plan) -> None:
        async with (
            InprocCluster(plan, f"llm-{uuid.uuid4().hex[:8]}") as cluster,
            AsyncClient(cluster.endpoint, timeout=_PATIENCE_SECONDS) as self.client,
        ):
            self._started.set_result(None)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # by close()
                # What follows is no longer cancelled: Python before 3.11.4 takes any timeout in such a task for another
                # cancellation, and services would be left as they are.
                _this_task().uncancel()
            finally:
                for task in self._work:
                    task.cancel()
                await asyncio.gather(*self._work, return_exceptions=True)

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = _this_task()
        self._work.add(task)
        try:
            return await coroutine
        finally:
            self._work.discard(task)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "called in a task"
    return task


def _quiet() -> None:
    """Services log for operators; while one is open a script sees errors only, unless it has set the level itself."""
    log = logging.getLogger("services")
    if log.level in (logging.NOTSET, _LEVEL):
        log.setLevel(_LEVEL if _open else logging.NOTSET)


def _close_all() -> None:
    for background in list(_open):
        background.close()


# Before the interpreter's own end: at atexit no executor takes work any more, and draining needs one.
getattr(threading, "_register_atexit")(_close_all)  # noqa: B009
