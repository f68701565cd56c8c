"""One accepted request from admission to its one terminal."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kadence.errors import BY_CODE, APIError, InternalError
from services.scheduler import routing
from services.scheduler.answer import Answer
from services.scheduler.request import Request


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
        self.cached_tokens += update.cached_tokens
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


class Session:
    """Joins a verifier's updates to the client that reads them.

    The reader may be slow: what it has not taken is joined into one piece, bounded by the answer's length.
    `end` is where every path ends; the first call counts.
    """

    def __init__(self, request: Request, answer: Answer, now: float) -> None:
        self.request = request
        self.answer = answer
        self.attempt = request.attempt
        self.stats = Stats()
        self.outcome: Finish | APIError | None = None
        self.accepted_at = now
        self.queued_at = now
        self.first_at = 0.0
        """When the first token came; 0.0 before."""
        self.last_at = 0.0
        """When the newest tokens came."""
        self.prefilled = False
        """Whether the verifier it is at has given a token."""
        self.work = 0
        """Tokens outstanding at its verifier; the link keeps the sum."""
        self.moves = 0
        """Verifiers that lost it."""
        self.failed_on = ""
        """The last of them."""
        self.loss = ""
        """What happened there, for the user."""
        self.on_end: Callable[[Session], None] | None = None
        self._ids: list[int] = []
        self._text: list[str] = []
        self._wake = asyncio.Event()

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.request.prompt_token_ids) + len(self.answer.token_ids)

    @property
    def produced(self) -> int:
        """Tokens this stream has produced, those it resumed from not counted."""
        return len(self.answer.token_ids) - len(self.request.resumed)

    def outstanding(self) -> int:
        """Work that is left of it."""
        sampling, produced = self.request.sampling, len(self.answer.token_ids)
        prompt = len(self.request.prompt_token_ids)
        return routing.work(prompt, produced, sampling.max_tokens, prefilled=self.prefilled)

    def prime(self) -> None:
        """Takes in the tokens that a resumed client holds; their text it has, and so it is not sent again."""
        ids, sampling = self.request.resumed, self.request.sampling
        if not ids:
            return
        stop_id = ids[-1] if ids[-1] in sampling.stop_token_ids else -1
        self.answer.feed(ids, last_is_stop_id=stop_id >= 0)
        if self.answer.stop_match is not None or stop_id >= 0:
            self.end(Finish(FinishReason.STOP, stop_id))
        elif len(ids) >= sampling.max_tokens:
            self.end(Finish(FinishReason.LENGTH))

    def receive(self, update: Update, now: float) -> int:
        """Takes one step's progress and returns how many tokens it added to the answer."""
        ids, terminal, kept = update.token_ids, update.terminal, 0
        if ids:
            if update.base_length != self.length:
                self.end(InternalError(f"verifier sent tokens from {update.base_length} on, not {self.length}"))
                return 0
            stop_id = terminal.stop_token_id if terminal is not None else -1
            kept, text = self.answer.feed(ids, last_is_stop_id=stop_id >= 0 and stop_id == ids[-1])
            self._ids += ids[:kept]
            self._text.append(text)
            self._wake.set()
            self.prefilled, self.last_at, self.first_at = True, now, self.first_at or now
        self.stats.add(update, kept)
        if self.answer.stop_match is not None:
            self.end(Finish(FinishReason.STOP))
        elif terminal is not None:
            failed = terminal.reason is FinishReason.FAILED
            self.end(terminal.error() if failed else Finish(terminal.reason, terminal.stop_token_id))
        return kept

    def end(self, outcome: Finish | APIError) -> bool:
        """Ends the request, unless it has ended before; whether this was the end."""
        if self.outcome is not None:
            return False
        self.outcome = outcome
        self._wake.set()
        if self.on_end is not None:
            self.on_end(self)
        return True

    async def take(self) -> tuple[list[int], str] | None:
        """The tokens that came since the last call and the text they completed; waits for some. None at the end."""
        while not self._ids:
            if self.outcome is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        piece = self._ids, "".join(self._text)
        self._ids, self._text = [], []
        return piece
