"""Pushes the policy and the list of drafters to every attached replica; a slow one gets the newest, not all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from kadence.errors import APIError
from services.scheduler import messages
from services.scheduler.policy import Epoch, Policy, succeed


class Outbox:
    """What one attached replica is still to be told."""

    def __init__(self) -> None:
        self._due: dict[str, Any] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._error: APIError | None = None

    def put(self, kind: str, message: Any) -> None:
        """Replaces what was due of this kind."""
        self._due[kind] = message
        self._wake.set()

    def close(self, error: APIError | None = None) -> None:
        """Ends the stream, with `error` if there is one; the first end counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wake.set()

    async def messages(self, heartbeat_seconds: float) -> AsyncIterator[Any]:
        """What is due, as it comes, and a heartbeat in each interval."""
        clock = asyncio.get_running_loop().time
        beats, beat_at = itertools.count(1), clock()
        while True:
            while self._due and not self._closed:
                yield self._due.pop(next(iter(self._due)))
            if self._closed:
                if self._error is not None:
                    raise self._error
                return
            if clock() >= beat_at:
                beat_at = clock() + heartbeat_seconds
                yield messages.heartbeat(next(beats))
            try:
                async with asyncio.timeout_at(beat_at):
                    await self._wake.wait()
            except TimeoutError:
                continue
            self._wake.clear()


class Publisher:
    """The policy in force with its epoch, the drafters, and everybody who must know."""

    def __init__(self, policy: Policy, boot_id: int, on_epoch: Callable[[Epoch], None]) -> None:
        self.policy = policy
        self.epoch = Epoch(boot_id, 1)
        self._on_epoch = on_epoch
        self._outboxes: dict[Outbox, str] = {}
        self._drafters = messages.drafters([])
        on_epoch(self.epoch)

    def subscribe(self, kind: str) -> Outbox:
        """An outbox for a replica of that kind, with all it must know at first."""
        outbox = Outbox()
        self._outboxes[outbox] = kind
        outbox.put("policy", messages.policy(self.policy, self.epoch))
        if kind == "verifier":
            outbox.put("drafters", self._drafters)
        return outbox

    def unsubscribe(self, outbox: Outbox) -> None:
        """Ends an outbox."""
        self._outboxes.pop(outbox, None)
        outbox.close()

    def seed(self, held: Epoch) -> None:
        """Learns of a policy that a replica holds; should it be newer than ours, ours is made anew after it."""
        epoch = succeed(self.epoch, held)
        if epoch != self.epoch:
            self._push(self.policy, epoch)

    def set_policy(self, policy: Policy) -> None:
        """Puts a policy in force."""
        self._push(policy, Epoch(self.epoch.boot_id, self.epoch.counter + 1))

    def set_drafters(self, replicas: list[Any]) -> None:
        """Tells every verifier which drafters are there."""
        self._drafters = messages.drafters(replicas)
        for outbox, kind in self._outboxes.items():
            if kind == "verifier":
                outbox.put("drafters", self._drafters)

    def close(self, error: APIError) -> None:
        """Ends every outbox."""
        for outbox in self._outboxes:
            outbox.close(error)

    def _push(self, policy: Policy, epoch: Epoch) -> None:
        self.policy, self.epoch = policy, epoch
        self._on_epoch(epoch)
        for outbox in self._outboxes:
            outbox.put("policy", messages.policy(policy, epoch))
