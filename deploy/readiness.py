"""Waits until every replica of a new cluster is attached to its scheduler and ready, verifiers with a drafter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from deploy.placement import Placement, StartError
from kadence import Client, ClusterStatus
from kadence.errors import APIError
from kadence.types import RetryConfig

_POLL_SECONDS = 0.2


def wait(
    endpoint: str, wanted: Mapping[str, int], placement: Placement, deadline: float, say: Callable[[str], None]
) -> ClusterStatus:
    """The status once `wanted` replicas of each kind are ready, and verifiers have found a drafter if there is one.

    Raises StartError if one fails, a drafter does not fit, or time is up.
    """
    told: dict[str, int] = {}
    ready: Counter[str] = Counter()
    # Whatever token the environment holds is for another cluster: this one asks for none.
    with Client(endpoint, retry=RetryConfig(attempts=1), token="") as client:
        while time.monotonic() < deadline:
            placement.check()
            status = _status(client)
            ready = Counter(r.kind for r in status.replicas if r.state == "ready") if status is not None else Counter()
            for kind, number in wanted.items():
                if number and ready[kind] != told.get(kind, 0):
                    told[kind] = ready[kind]
                    say(f"{kind}: {ready[kind]} of {number} ready")
            complete = all(ready[kind] >= number for kind, number in wanted.items())
            if status is not None and complete and (not wanted.get("drafter") or _drafting(status)):
                return status
            time.sleep(_POLL_SECONDS)
    missing = next((kind for kind, number in wanted.items() if ready[kind] < number), "")
    if not missing:
        raise StartError("verifier", "it found no drafter in time", placement.log("verifier"))
    raise StartError(missing, f"{ready[missing]} of {wanted[missing]} ready in time", placement.log(missing))


def _drafting(status: ClusterStatus) -> bool:
    """Whether every verifier has a drafter. Raises StartError if a drafter will never fit."""
    verifiers = [r for r in status.replicas if r.kind == "verifier" and r.state == "ready"]
    for verifier in verifiers:
        if verifier.drafter_problem:
            raise StartError("drafter", verifier.drafter_problem)
    return all(verifier.drafter for verifier in verifiers)


def _status(client: Client) -> ClusterStatus | None:
    try:
        return client.status(timeout=2.0)
    except APIError:
        return None
