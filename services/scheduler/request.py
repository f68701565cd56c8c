"""A request in three shapes: as asked, the limits it is held against, and as understood."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_ANSWERS = 64
"""Answers to one request; fewer where the configuration has no room for as many."""


class Rule(enum.IntEnum):
    """Acceptance rules, with the numbers of kadence.v1.Rule."""

    UNSPECIFIED = 0
    MATCH = 1
    RATIO = 2


@dataclass(frozen=True, slots=True)
class Options:
    """Sampling options as they came; None where the client said nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    rule: int = Rule.UNSPECIFIED
    max_draft_tokens: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int | None = None
    n: int | None = None
    logprobs: int | None = None
    priority: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Where an interrupted stream stood."""

    token_ids: tuple[int, ...] = ()
    """Of the first answer."""
    seed: int = 0
    attempt: int = 0
    rule: int = Rule.UNSPECIFIED
    more: tuple[tuple[int, ...], ...] = ()
    """Tokens of the answers after the first."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it came from the wire; nothing is checked yet."""

    request_id: str = ""
    model: str = ""
    prompt: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) pairs."""
    prompt_token_ids: tuple[int, ...] = ()
    options: Options = Options()
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are held against."""

    model: str
    vocab_size: int
    max_model_len: int
    """Longest prompt plus answer, tokens."""
    max_prompt_bytes: int
    """No longer text can fit into the context; checked before tokenising."""
    default_max_tokens: int = 1024
    max_answers: int = MAX_ANSWERS
    """To one request."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own stop ids."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as the engine needs it: checked, defaults filled in."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    """Tokens of the whole answer, those of a resumed stream included."""
    stop_token_ids: tuple[int, ...]
    rule: Rule
    max_draft_tokens: int | None
    priority: float
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences that may not be produced."""
    min_tokens: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One answer of a request as understood: everything a verifier needs, and what the scheduler keeps to itself."""

    request_id: str
    """The client's, shared by all answers of its request."""
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    resumed: tuple[int, ...] = ()
    """Tokens of the answer that the client already holds."""
    attempt: int = 0
    index: int = 0
    """Which of the request's answers."""

    @property
    def key(self) -> str:
        """Names the answer in the cluster. No client's id is like it: those are printable, a no-break space is not."""
        return f"{self.request_id}\u00a0{self.index}" if self.index else self.request_id
