"""What goes into a request and what comes out of it, as plain immutable types."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

Rule = Literal["match", "ratio"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Message:
    """One message of a conversation; role is "system", "user" or "assistant"."""

    role: str
    content: str


class SamplingOptions(TypedDict, total=False):
    """How tokens are drawn. An option that is left out, or None, takes the server's default, named in brackets."""

    temperature: float | None
    """[model, else 0] Softmax temperature, 0..100; 0 is greedy."""
    top_p: float | None
    """[model, else 1] Nucleus mass in (0, 1]."""
    top_k: int | None
    """[model, else 0] Keep the k likeliest tokens; 0 keeps all."""
    min_p: float | None
    """[model, else 0] Drop tokens below min_p times the best probability, [0, 1]."""
    seed: int | None
    """[random] Noise seed, unsigned 64 bits; the result holds the effective one."""
    max_tokens: int | None
    """[model, else up to the context length, at most 1024] Tokens to produce, >= 1."""
    min_tokens: int | None
    """[0] Neither stop ids nor stop strings end the answer before this many tokens."""
    stop: str | Sequence[str] | None
    """Generation ends before the first of these strings; at most 16 of at most 256 bytes."""
    stop_token_ids: Sequence[int] | None
    """Generation ends with the first of these ids, beside the model's own; at most 64."""
    ignore_eos: bool | None
    """[False] Go on past the model's end-of-sequence ids."""
    rule: Rule | None
    """["match"] How drafts are accepted; both rules follow the model's law exactly. With "match" the text is a
    function of prompt, options and seed; "ratio" accepts more when sampling; its text also depends on the drafts."""
    max_draft_tokens: int | None
    """[the policy's] Most draft tokens verified per step; 0 switches speculation off."""
    repetition_penalty: float | None
    """[model, else 1] Divides (multiplies) positive (negative) logits of tokens in prompt or answer, (0, 2]."""
    presence_penalty: float | None
    """[0] Subtracted once from logits of tokens already produced, -2..2."""
    frequency_penalty: float | None
    """[0] Subtracted per occurrence from logits of tokens already produced, -2..2."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these ids, -100..100; at most 1024."""
    allowed_token_ids: Sequence[int] | None
    """Only these ids may be produced (end-of-sequence ids too must be listed); empty allows all."""
    bad_words: Sequence[str] | None
    """Strings that may not be produced, as tokenised alone or after a space; at most 64 of at most 256 bytes."""
    n: int | None
    """[1] Answers to the prompt, at most 64; answer i is what the request gives alone with seed + i (rule "match")."""
    logprobs: int | None
    """[none] Log-probabilities of the chosen token and of this many best ones, at most 20."""
    priority: float | None
    """[1] Weight of this request's expected tokens when rows are scarce, (0, 100]. No policy so far uses it."""


class GenerateOptions(SamplingOptions, total=False):
    """Everything a generation takes beside `prompt`. Exactly one of prompt, messages, prompt_token_ids is set."""

    messages: Sequence[Message | Mapping[str, str]] | None
    """A conversation, rendered with the model's chat template."""
    prompt_token_ids: Sequence[int] | None
    """Token ids, used as they stand."""
    model: str
    """Served model name; left out, the only one."""
    request_id: str
    """Appears in the server's logs; left out, the server chooses. At most 128 bytes."""
    timeout: float | None
    """Seconds for the whole request, retries included; left out, the client's."""
    metadata: Mapping[str, str] | None
    """gRPC metadata of this request, over the client's."""


@dataclass(frozen=True)
class RetryConfig:
    """When a call is tried again: if the server cannot be reached or asks for it.

    A stream that breaks after it began is resumed from the tokens received, as often as `resume_seconds` allows.
    """

    attempts: int = 4
    """Tries in all until an answer begins; 1 never retries."""
    initial_delay: float = 0.1
    """Seconds before the second try."""
    multiplier: float = 2.0
    """Each further delay is this much longer."""
    max_delay: float = 5.0
    """Longest delay, seconds; a server that asks for more is not tried again, unless a stream is resumed."""
    jitter: float = 0.2
    """Share of a delay that is drawn at random, so that clients do not return together."""
    resume_seconds: float = 30.0
    """How long a stream that broke is tried again, counted from its break until new tokens arrive; 0 never resumes."""


@dataclass(frozen=True)
class TLSConfig:
    """How a connection is encrypted. Each of the three is a path, or the PEM text itself as bytes."""

    root_certificates: str | os.PathLike[str] | bytes | None = None
    """Whom to trust; left out, the authorities that gRPC trusts by default."""
    client_certificate: str | os.PathLike[str] | bytes | None = None
    """Who we are, for servers that ask (mutual TLS); goes with `client_key`."""
    client_key: str | os.PathLike[str] | bytes | None = field(default=None, repr=False)
    server_name: str = ""
    """Name that the server's certificate must bear; left out, the endpoint's host."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities where one token was produced, before temperature, penalties and filters."""

    token_id: int
    """The token that was produced."""
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the likeliest tokens, likeliest first; as many as were asked for."""


@dataclass(frozen=True)
class Chunk:
    """Newly produced tokens; the text may lag the ids by an incomplete character or a possible stop string."""

    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    """Which of the n answers."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, if asked for."""


@dataclass(frozen=True)
class Stats:
    """Speculation statistics; steps that verified and committed, prefill's first token not counted.

    Of an answer whose stream was resumed they cover the last stream only.
    """

    steps: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    committed: int = 0
    k_hist: tuple[int, ...] = ()
    """k_hist[k] counts the steps that verified k drafted tokens."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused instead of computed."""

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per step, the target's own included; 0.0 if there was no step."""
        return self.committed / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class GenerateResult:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    prompt_token_ids: tuple[int, ...]
    """The prompt after chat template and tokenizer."""
    seed: int
    """Effective seed: with rule "match" the same request with it, alone, gives the same answer; of answer i it is
    seed + i."""
    rule: Rule
    model: str
    request_id: str
    stop_match: str = ""
    """The stop string, or the id as text, that ended the answer; empty if none did."""
    attempt: int = 0
    """0 for a first try, one more after each time the stream was resumed."""
    index: int = 0
    """Which of the n answers."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id, if asked for."""
    alternatives: tuple[GenerateResult, ...] = ()
    """Answers 1 to n - 1, in the result of answer 0."""


@dataclass(frozen=True)
class ModelInfo:
    """A served model."""

    name: str
    max_model_len: int
    """Longest prompt plus answer, tokens."""
    vocab_size: int
    drafter_kind: str


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica as the scheduler sees it."""

    replica_id: str
    kind: str
    """"scheduler", "verifier" or "drafter"."""
    address: str
    state: str
    """"ready", "draining" or "lost"."""
    serves: str = ""
    """Model or drafter kind."""
    metrics_address: str = ""
    http_address: str = ""
    """Of the HTTP API; empty if off or not a scheduler."""
    pid: int = 0
    running: int = 0
    waiting: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    policy_epoch: str = ""
    stats: Stats = field(default_factory=Stats)
    """Totals since start."""
    drafter: str = ""
    """Replica id of the drafter that a verifier drafts with; empty: none."""
    drafter_problem: str = ""
    """Why the drafter it tried last can never be used; empty: none, or one that may come yet."""


@dataclass(frozen=True)
class ClusterStatus:
    """A snapshot of the cluster."""

    policy: str
    policy_epoch: str
    requests_in_flight: int
    requests_queued: int
    replicas: tuple[ReplicaStatus, ...]
