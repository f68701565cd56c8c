"""Decides whether a request runs now, waits or is refused."""

from __future__ import annotations

import enum

MIN_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0
_UNBOUNDED = 1 << 30


class Verdict(enum.Enum):
    """What becomes of a new request."""

    RUN = "run"
    WAIT = "wait"
    REFUSE = "refuse"


def admit(*, queued: int, max_queue: int, free: int, count: int = 1) -> Verdict:
    """First come, first served: answers run at once only if nobody waits and places are free.

    `queued` answers wait now and at most `max_queue` may; `free` more may run. `count` come together, and if not all
    of them can run or wait, none may.
    """
    waiting = count if queued else count - free
    if waiting <= 0:
        return Verdict.RUN
    return Verdict.WAIT if queued + waiting <= max_queue else Verdict.REFUSE


def places(*, in_flight: int, max_in_flight: int, free_of_verifiers: int) -> int:
    """How many more requests may run, by our own bound and by the verifiers' capacity."""
    return max(0, min(max_in_flight - in_flight, free_of_verifiers))


def verifier_capacity(max_sessions: int) -> int:
    """Requests sent to a verifier that runs `max_sessions` at once: one eighth more, so that no slot waits for us.

    0 means it named no limit.
    """
    return max_sessions + max(1, max_sessions // 8) if max_sessions > 0 else _UNBOUNDED


def retry_after(*, queued: int, running: int, seconds_per_request: float) -> float:
    """Seconds until a place in the queue is likely: the time in which half of the queue drains."""
    waves = (queued / 2) / max(running, 1)
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, waves * seconds_per_request))
