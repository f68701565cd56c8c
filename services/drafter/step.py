"""One step's work and its answer in plain types; what messages.py makes of DraftRequest and DraftResponse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.drafter.methods import DraftItem, DraftSampling, FeatureRows


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which request's work, at which moment; see common.proto."""

    request_id: str
    attempt: int
    round: int
    base_length: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that follow the session's first `stamp.base_length`."""

    stamp: Stamp
    token_ids: Sequence[int]
    rows: FeatureRows | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A session that wants at most `max_tokens` (>= 1) tokens now."""

    stamp: Stamp
    max_tokens: int
    sampling: DraftSampling = field(default_factory=DraftSampling)


@dataclass(frozen=True, slots=True)
class Step:
    """What one message asks, in the order in which it is applied."""

    number: int
    closes: Sequence[Stamp] = ()
    opens: Sequence[Stamp] = ()
    commits: Sequence[Commit] = ()
    wishes: Sequence[Wish] = ()


@dataclass(slots=True)
class Answer:
    """Drafts and resyncs (stamp, tokens held) of one step."""

    number: int
    drafts: list[tuple[Stamp, DraftItem]] = field(default_factory=list)
    resyncs: list[tuple[Stamp, int]] = field(default_factory=list)
    compute_seconds: float = 0.0
