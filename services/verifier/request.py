"""One request inside the engine: its tokens, its pages, and what it has done so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from services.model.edits import Edits
from services.model.probs import RowLaw
from services.verifier.history import History
from services.verifier.paged_kv import PageList
from services.verifier.sampling import Sampling as Sampling


class FinishReason(Enum):
    """Why the engine ended a request."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Terminal:
    """The end of a request; `code` and `message` are set when it failed."""

    reason: FinishReason
    stop_token_id: int = -1
    code: str = ""
    message: str = ""


@dataclass(eq=False)
class Request:
    """State of one attempt. `tokens` is the prompt, then everything committed.

    tokens   [ ------- prompt ------- | -- output -- ]
    pages    [ -- KV committed -- |  pending  ]         pending >= 1; the newest token (the anchor) never has KV
    """

    request_id: str
    attempt: int
    owner: str
    prompt_length: int
    tokens: list[int]
    sampling: Sampling
    tenant: str = ""
    round: int = 0
    pages: PageList = field(default_factory=PageList)
    _history: History | None = field(default=None, init=False, repr=False)
    addresses: list[bytes] = field(default_factory=list)
    """Of the full pages of `tokens` so far (see prefix.extend)."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was there when it was first admitted; None before that."""

    @property
    def pending(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.pages.committed

    @property
    def decoding(self) -> bool:
        """Whether only the anchor is without KV, so that this step may verify a draft."""
        return self.pending == 1 and len(self.tokens) > self.prompt_length

    @property
    def produced(self) -> int:
        """Tokens generated, earlier attempts included."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens it may still produce."""
        return self.sampling.max_tokens - self.produced

    @property
    def noise(self) -> tuple[int, int, int] | None:
        """(seed, attempt, round) of rule `ratio`'s noise; None under `match`, and where the best token is taken."""
        s = self.sampling
        return (s.seed, self.attempt, self.round) if s.rule == "ratio" and s.temperature > 0 else None

    def law(self, position: int, edits: Edits | None = None) -> RowLaw:
        """How the token at absolute `position` is drawn."""
        s = self.sampling
        return RowLaw(s.temperature, s.top_k, s.top_p, s.seed, position, s.min_p, edits)

    def edits(self, draft: list[int]) -> list[Edits | None]:
        """What the options change in the logits after the newest token, and after each of `draft`."""
        if not self.sampling.edits:
            return [None] * (1 + len(draft))
        if self._history is None:
            self._history = History(self.sampling, self.tokens[: self.prompt_length])
        return self._history.edits(self.tokens, draft)

    def append(self, tokens: list[int]) -> tuple[list[int], Terminal | None]:
        """Commits tokens up to and including the one that ends the request; returns those committed, and the end."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self.sampling.stop_token_ids:
                return tokens[:count], Terminal(FinishReason.STOP, stop_token_id=token)
            if self.remaining <= 0:
                return tokens[:count], Terminal(FinishReason.LENGTH)
        return tokens, None
