"""What becomes of an answer: a verifier's updates, pieces for the client, and how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from kadence.errors import BY_CODE, APIError, InternalError


class FinishReason(enum.IntEnum):
    """Why an accepted request ended, with the numbers of kadence.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4


class Terminal(NamedTuple):
    """A verifier's last word on a request."""

    reason: FinishReason
    stop_token_id: int = -1
    error_code: str = ""
    error_message: str = ""

    def error(self) -> APIError:
        """The exception of a FAILED request."""
        kind = BY_CODE.get(self.error_code, InternalError)
        return kind(self.error_message or "the verifier gave no reason")


class Logprobs(NamedTuple):
    """Log-probabilities where one token was produced, under the model's own law; see kadence.v1.TokenLogprobs."""

    logprob: float
    """Of the token itself."""
    top_ids: tuple[int, ...]
    """The likeliest ids, likeliest first."""
    top: tuple[float, ...]
    """Their log-probabilities."""


class Update(NamedTuple):
    """What one engine step did for one request."""

    base_length: int
    token_ids: list[int]
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    decode_step: bool = False
    cached_tokens: int = 0
    terminal: Terminal | None = None
    logprobs: tuple[Logprobs, ...] = ()
    """One per token id, if the request asked for them."""


class Finish(NamedTuple):
    """How an answer ended; the other way to end is an APIError."""

    reason: FinishReason
    stop_token_id: int = -1


@dataclass(slots=True)
class Stats:
    """Speculation statistics of one request; see kadence.v1.GenerationStats."""

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    cached_tokens: int = 0
    k_hist: list[int] = field(default_factory=list)

    def add(self, update: Update, kept: int) -> None:
        """Counts a step of which `kept` tokens belong to the answer."""
        if not update.decode_step or kept == 0:
            return
        self.steps += 1
        self.drafted += update.drafted
        self.verified += update.verified
        self.accepted += min(update.accepted, kept)
        self.committed += kept
        if len(self.k_hist) <= update.verified:
            self.k_hist += [0] * (update.verified + 1 - len(self.k_hist))
        self.k_hist[update.verified] += 1


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one answer, in order, and the text they completed."""

    index: int
    """Which of the request's answers."""
    token_ids: list[int]
    text: str
    logprobs: list[Logprobs]
    """One per token id, if asked for."""


@dataclass(frozen=True, slots=True)
class End:
    """The one end of one answer; its reason is never FAILED, that is an exception."""

    index: int
    reason: FinishReason
    text: str
    """Held back until the end was known."""
    stop_match: str
    """The stop string or the text of the stop id that ended it; empty if none."""
    stats: Stats
    completion_tokens: int
