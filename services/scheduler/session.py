"""One answer from admission to its one terminal."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kadence.errors import APIError, InternalError
from services.scheduler import routing
from services.scheduler.answer import Answer
from services.scheduler.outcomes import Finish, FinishReason, Logprobs, Piece, Stats, Update
from services.scheduler.request import Request

_MOST_TAKEN = 4096
"""Tokens; with twenty log-probabilities each they make a message of 1 MB."""


class Session:
    """Joins a verifier's updates to the client that reads them.

    The reader may be slow: what it has not taken is kept, and it is bounded by the answer's length (and so are the
    log-probabilities, of which a token has at most one and twenty).
    `wake` is set whenever there is something to take, or the end; answers of one stream share it.
    `end` is where every path ends; the first call counts.
    """

    def __init__(self, request: Request, answer: Answer, now: float, wake: asyncio.Event) -> None:
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
        self._fresh: deque[Piece] = deque()
        self._wake = wake

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
        may_stop = len(ids) > sampling.min_tokens
        stop_id = ids[-1] if may_stop and ids[-1] in sampling.stop_token_ids else -1
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
            if self.request.sampling.logprobs is not None and len(update.logprobs) != len(ids):
                self.end(InternalError(f"verifier sent {len(update.logprobs)} log-probabilities of {len(ids)} tokens"))
                return 0
            if not self.first_at:
                # Only the first verifier's: another one, after a move, may reuse what the first has computed.
                self.stats.cached_tokens = min(update.cached_tokens, len(self.request.prompt_token_ids))
            stop_id = terminal.stop_token_id if terminal is not None else -1
            kept, text = self.answer.feed(ids, last_is_stop_id=stop_id >= 0 and stop_id == ids[-1])
            self._fresh.append(Piece(self.request.index, ids[:kept], text, list(update.logprobs[:kept])))
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

    @property
    def over(self) -> bool:
        """Whether it has ended and everything was taken."""
        return self.outcome is not None and not self._fresh

    def take(self) -> Piece | None:
        """The tokens that came since the last call, as many as make a message of moderate size; None if none came."""
        if not self._fresh:
            return None
        ids: list[int] = []
        text: list[str] = []
        logprobs: list[Logprobs] = []
        while self._fresh and len(ids) < _MOST_TAKEN:
            piece = self._fresh.popleft()
            ids += piece.token_ids
            text.append(piece.text)
            logprobs += piece.logprobs
        if self._fresh:
            self._wake.set()
        return Piece(self.request.index, ids, "".join(text), logprobs)
