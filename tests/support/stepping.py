"""An engine without its thread: the test takes each step itself, and looks at the pages in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.verifier.request import Request
from services.verifier.target import Target
from tests.support.engine_harness import Answer, Harness

_MOST_STEPS = 20_000


class Stepping(Harness):
    """Many requests, one after the other or at once, over one engine and its cache."""

    def __init__(self, target: Target, **options: Any) -> None:
        super().__init__(target, **options)
        self.rows: list[int] = []
        """Rows of each step."""

    def submit(self, *requests: Request) -> None:
        """Queues them; they enter before the next step."""
        for request in requests:
            self.engine.submit(request)

    def step(self) -> None:
        """One step, as the engine's thread takes it; afterwards every page must be accounted for."""
        updates: list[Any] = []
        for apply in self.engine._inbox.take(wait=False):
            apply(updates)
        before = len(self.reports)
        self.engine.step(updates)
        self.rows.extend(report.rows for report in self.reports[before:])
        self.engine._pool.check()

    def until(self, done: Callable[[], bool]) -> None:
        """Steps until it holds."""
        for _ in range(_MOST_STEPS):
            if done():
                return
            self.step()
        raise AssertionError("it never came to that")

    def play(self, *requests: Request) -> dict[str, Answer]:
        """All of them at once, to their ends; then nobody may hold a page."""
        lengths = {r.request_id: len(r.tokens) for r in requests}
        self.submit(*requests)
        self.step()
        self.until(lambda: not self.engine.busy)
        self.engine._idle()
        for name, length in lengths.items():
            self.answers[name].check(length)
        return {name: self.answers[name] for name in lengths}

    def cached(self, name: str) -> int:
        """Prompt tokens that the request was told to have found, which it is told once."""
        told = [update.cached_tokens for update in self.answers[name].updates]
        assert not any(told[1:])
        return told[0]
