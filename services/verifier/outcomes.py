"""What steps did: per-request updates, running totals, and the load the scheduler routes by."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from services.model.logprobs import TokenLogprobs as TokenLogprobs
from services.verifier.request import Request, Terminal


@dataclass(frozen=True)
class Update:
    """One request's part of one step. `base_length` and `round` are those before the new tokens."""

    request_id: str
    attempt: int
    owner: str
    round: int
    base_length: int
    tokens: list[int]
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    decode_step: bool = False
    terminal: Terminal | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused; in the first update with tokens only."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token if the request asks for them, else none."""


@dataclass
class Totals:
    """Sums since start. committed counts tokens of decode steps: committed / request_steps is the acceptance length."""

    steps: int = 0
    request_steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    preemptions: int = 0
    k_hist: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache, each once."""
    prefix_hits: int = 0
    """Tokens whose KV was found there."""

    def snapshot(self) -> Totals:
        """A copy that stays as it is."""
        return replace(self, k_hist=list(self.k_hist), accepted_at=list(self.accepted_at))

    def add(self, update: Update) -> None:
        """Counts one update."""
        self.generated += len(update.tokens)
        if not update.decode_step:
            return
        self.request_steps += 1
        self.drafted += update.drafted
        self.verified += update.verified
        self.accepted += update.accepted
        self.committed += len(update.tokens)
        _bump(self.k_hist, update.verified)
        for position in range(update.accepted):
            _bump(self.accepted_at, position)


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot for the scheduler and the metrics."""

    running: int
    waiting: int
    outstanding_tokens: int
    pages_used: int
    pages_total: int
    step_seconds: float
    policy_epoch: tuple[int, int]
    stats: Totals


@dataclass(frozen=True)
class StepReport:
    """All updates of one step; `seconds` is its length, `rows` what the target ran; both 0 if nothing ran."""

    step: int
    updates: list[Update]
    seconds: float
    rows: int
    load: EngineLoad


class Pace:
    """Recent step times and what drafts gained; tells how long waiting for a draft can pay."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=33)
        self._gain = 1.0  # accepted tokens per drafting request and step, moving average; optimistic at first

    def add_step(self, seconds: float) -> None:
        """Records a decode step."""
        self._steps.append(seconds)

    def add_gain(self, accepted: float) -> None:
        """Records the mean accepted tokens of a step's drafting requests."""
        self._gain += 0.1 * (accepted - self._gain)

    @property
    def step_seconds(self) -> float:
        """Recent median; 0 if there was no step."""
        return statistics.median(self._steps) if self._steps else 0.0

    def patience(self, floor: float) -> float:
        """Seconds a draft is worth waiting for: each accepted token saves its request a step."""
        return max(floor, self._gain * self.step_seconds)


def update_of(request: Request, terminal: Terminal | None = None) -> Update:
    """An update without progress that names the request as it stands, and says that it is over if it is."""
    return Update(
        request_id=request.request_id,
        attempt=request.attempt,
        owner=request.owner,
        round=request.round,
        base_length=len(request.tokens),
        tokens=[],
        terminal=terminal,
    )


def _bump(counts: list[int], index: int) -> None:
    counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1
