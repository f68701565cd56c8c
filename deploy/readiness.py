"""Waits until every replica of a new cluster is attached to its scheduler and ready."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from deploy.placement import Placement, StartError
from kadence import Client
from kadence.errors import APIError
from kadence.types import RetryConfig

_POLL_SECONDS = 0.2


def wait(
    endpoint: str, wanted: Mapping[str, int], placement: Placement, deadline: float, say: Callable[[str], None]
) -> None:
    """Returns once `wanted` replicas of each kind are ready. Raises StartError if one fails or time is up."""
    told: dict[str, int] = {}
    ready: Counter[str] = Counter()
    with Client(endpoint, retry=RetryConfig(attempts=1)) as client:
        while time.monotonic() < deadline:
            placement.check()
            ready = _ready(client)
            for kind, number in wanted.items():
                if number and ready[kind] != told.get(kind, 0):
                    told[kind] = ready[kind]
                    say(f"{kind}: {ready[kind]} of {number} ready")
            if all(ready[kind] >= number for kind, number in wanted.items()):
                return
            time.sleep(_POLL_SECONDS)
    missing = next(kind for kind, number in wanted.items() if ready[kind] < number)
    raise StartError(missing, f"{ready[missing]} of {wanted[missing]} ready in time", placement.log(missing))


def _ready(client: Client) -> Counter[str]:
    try:
        status = client.status(timeout=2.0)
    except APIError:
        return Counter()
    return Counter(replica.kind for replica in status.replicas if replica.state == "ready")
