"""How OpenMP's threads wait in processes that compute. Must be set before torch is imported."""

from __future__ import annotations

import os

# A step is a chain of short parallel regions. Threads that sleep at once pay a wake-up for each (measured: twice the
# step); threads that spin for ever steal the core from peers that work between steps. Spin through a step, no longer.
WAITING = {"GOMP_SPINCOUNT": "10000"}


def set_waiting() -> None:
    """Applies WAITING to this process, where the user has not chosen otherwise."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
