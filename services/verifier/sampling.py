"""How one request's tokens are drawn, and what no request may ask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kadence.errors import InvalidRequestError
from kadence.types import Rule

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class Sampling:
    """Validated sampling of one request (see kadence.internal.Sampling)."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    max_draft_tokens: int | None
    rule: Rule = "match"
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def edits(self) -> bool:
        """Whether any option changes logits before temperature."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        masks = self.allowed_token_ids or self.bad_words or (self.min_tokens > 0 and self.stop_token_ids)
        return bool(penalties or masks or self.logit_bias)


def check(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidRequestError naming field, value and limit of the first thing that is wrong."""
    for name, reason in _wrong(sampling, vocab_size):
        raise InvalidRequestError.of(name, reason)


def _wrong(s: Sampling, vocab_size: int) -> Iterator[tuple[str, str]]:
    # Written so that NaN, which compares false with everything, is caught by the same line.
    if not (0 <= s.temperature <= 100 and 0 < s.top_p <= 1 and s.top_k >= 0):
        yield "sampling", f"temperature {s.temperature}, top_p {s.top_p}, top_k {s.top_k} is out of range"
    if not 0 <= s.min_p <= 1:
        yield "min_p", f"{s.min_p} is out of range, 0 to 1"
    if not 0 < s.repetition_penalty < math.inf:
        yield "repetition_penalty", f"{s.repetition_penalty} is out of range, above 0 and finite"
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(s, name)):
            yield name, f"{getattr(s, name)} is out of range, a finite number"
    for token, bias in s.logit_bias.items():
        if not math.isfinite(bias):
            yield "logit_bias", f"{bias} of id {token} is out of range, a finite number"
    yield from _outside("logit_bias", s.logit_bias, vocab_size)
    yield from _outside("allowed_token_ids", s.allowed_token_ids, vocab_size)
    for index, word in enumerate(s.bad_words):
        if not word:
            yield f"bad_words[{index}]", "is empty, at least one token is needed"
        yield from _outside(f"bad_words[{index}]", word, vocab_size)
    if not 0 <= s.min_tokens <= s.max_tokens:
        yield "min_tokens", f"{s.min_tokens} is out of range, 0 to max_tokens, which is {s.max_tokens}"
    if s.min_tokens > 0 and s.stop_token_ids.issuperset(s.allowed_token_ids or range(vocab_size)):
        yield "min_tokens", f"{s.min_tokens}, but every id allowed is a stop id; at least 1 other is needed, or 0"
    if s.logprobs is not None and not 0 <= s.logprobs <= MAX_LOGPROBS:
        yield "logprobs", f"{s.logprobs} is out of range, 0 to {MAX_LOGPROBS}"


def _outside(name: str, ids: Iterable[int], vocab_size: int) -> Iterator[tuple[str, str]]:
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        yield name, f"{bad} is outside the vocabulary of {vocab_size}"
