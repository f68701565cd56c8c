"""Hands work from any thread to the engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Actions in order of arrival; the engine applies them between steps."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._actions: list[Callable[[T], None]] = []

    def post(self, action: Callable[[T], None]) -> None:
        """Leaves an action; wakes the engine if it sleeps."""
        with self._arrived:
            self._actions.append(action)
            self._arrived.notify()

    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._actions

    def take(self, *, wait: bool) -> list[Callable[[T], None]]:
        """What has arrived; with `wait` at least one action, however long that takes."""
        with self._arrived:
            if wait:
                self._arrived.wait_for(lambda: self._actions)
            actions, self._actions = self._actions, []
            return actions
