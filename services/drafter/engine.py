"""Runs steps on the method, one at a time: short ones on the event loop, long ones on the one compute thread."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from services.drafter.methods import DraftItem, Method
from services.drafter.metrics import DrafterMetrics
from services.drafter.session import Capacity, Plan, Sessions
from services.drafter.step import Answer, Step

_log = logging.getLogger(__name__)


class Engine:
    """The method, its sessions over all streams, and the thread it computes on."""

    def __init__(self, method: Method, max_sessions: int, metrics: DrafterMetrics) -> None:
        self._method = method
        self._capacity = Capacity(max_sessions, method.traits.kv_tokens)
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="drafter")
        self._idle = asyncio.Event()
        self._idle.set()
        self._recent: deque[float] = deque(maxlen=64)
        self.steps = 0
        """Steps answered since start."""

    @property
    def sessions(self) -> int:
        """Sessions open, over all streams."""
        return self._capacity.sessions

    @property
    def step_seconds(self) -> float:
        """Recent median computing time; 0 before the first step."""
        return statistics.median(self._recent) if self._recent else 0.0

    def new_sessions(self) -> Sessions:
        """An empty table for a new stream."""
        return Sessions(self._capacity, self._method.traits)

    async def step(self, sessions: Sessions, step: Step) -> Answer | None:
        """Applies one message; None unless it asked for drafts."""
        async with self._lock:
            plan = sessions.plan(step)
            self._sessions_changed()
            began = time.perf_counter()
            drafts = await self._run(plan)
            seconds = time.perf_counter() - began
        self._metrics.stale_messages.inc(plan.stale)
        self._metrics.feature_rows.inc(plan.rows)
        if not step.wishes:
            return None
        self._count(plan, drafts, seconds)
        named = [(stamp, draft) for (stamp, _), draft in zip(plan.proposes, drafts, strict=True)]
        return Answer(step.number, named, list(plan.resyncs.values()), seconds)

    async def drop(self, sessions: Sessions) -> None:
        """Ends all sessions of a stream that is over."""
        async with self._lock:
            for key in sessions.close_all():
                try:
                    self._method.close(key)
                except Exception:  # a method that failed half-way through a step may not know all of them
                    _log.exception("closing a session failed")
            self._sessions_changed()

    async def wait_idle(self, seconds: float) -> None:
        """Returns when no session is open, or after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def responsive(self, seconds: float) -> bool:
        """Whether the compute thread comes free within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().run_in_executor(self._pool, lambda: None)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Ends the compute thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _sessions_changed(self) -> None:
        self._metrics.sessions.set(self.sessions)
        self._metrics.kv_tokens.set(self._capacity.tokens)
        if self.sessions:
            self._idle.clear()
        else:
            self._idle.set()

    async def _run(self, plan: Plan) -> list[DraftItem]:
        # A change of threads costs a tenth of a millisecond, several when other threads compute in Python.
        if plan.tokens <= self._method.inline_tokens:
            return self._compute(plan)
        work = asyncio.get_running_loop().run_in_executor(self._pool, self._compute, plan)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])  # the lock is not given up while the thread works
            raise

    def _compute(self, plan: Plan) -> list[DraftItem]:
        method = self._method
        for key in plan.closes:
            method.close(key)
        for key in plan.opens:
            method.open(key)
        if plan.news:
            method.commit(plan.news)
        return method.propose([item for _, item in plan.proposes]) if plan.proposes else []

    def _count(self, plan: Plan, drafts: list[DraftItem], seconds: float) -> None:
        self.steps += 1
        self._recent.append(seconds)
        self._metrics.steps.inc()
        self._metrics.compute_seconds.observe(seconds)
        self._metrics.proposed_tokens.inc(sum(len(draft.token_ids) for draft in drafts))
        self._metrics.resyncs.inc(len(plan.resyncs))
