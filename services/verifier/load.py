"""The engine's load at one moment, put together from who keeps its parts."""

from __future__ import annotations

from dataclasses import replace

from services.verifier.allocation import Policy
from services.verifier.outcomes import EngineLoad, Pace, Totals
from services.verifier.roster import Roster


def load_of(roster: Roster, totals: Totals, pace: Pace, policy: Policy) -> EngineLoad:
    """A snapshot that stays as it is; it walks the requests."""
    stats = replace(
        totals.snapshot(),
        preemptions=roster.preemptions,
        prefix_queries=roster.looked_up,
        prefix_hits=roster.reused,
    )
    return EngineLoad(
        running=len(roster.running),
        waiting=len(roster.waiting),
        outstanding_tokens=roster.outstanding_tokens,
        pages_used=roster.pool.used,
        pages_total=roster.pool.num_pages,
        step_seconds=pace.step_seconds,
        policy_epoch=policy.epoch,
        stats=stats,
    )
