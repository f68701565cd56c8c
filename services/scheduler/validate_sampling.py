"""Says what is wrong with a request's sampling options."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kadence.errors import FieldViolation
from services.scheduler.request import Limits, Options, Rule

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 2.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 64
MAX_STRING_BYTES = 256
"""Of a stop string or a bad word."""
MAX_LOGPROBS = 20
MAX_PRIORITY = 100.0


def check_sampling(options: Options, limits: Limits) -> Iterator[FieldViolation]:
    """Everything that is wrong with the options, but for what depends on the length of the prompt."""
    yield from _law(options)
    yield from _penalties(options)
    yield from _lengths(options, limits)
    yield from check_rule("sampling.rule", options.rule)
    yield from _strings("stop", options.stop, MAX_STOP_STRINGS)
    if len(options.stop_token_ids) > MAX_STOP_IDS:
        yield FieldViolation("sampling.stop_token_ids", f"{len(options.stop_token_ids)} ids; at most {MAX_STOP_IDS}")
    yield from check_ids("sampling.stop_token_ids", options.stop_token_ids, limits)
    yield from _biases(options, limits)
    yield from check_ids("sampling.allowed_token_ids", options.allowed_token_ids, limits)
    yield from _strings("bad_words", options.bad_words, MAX_BAD_WORDS)
    yield from _first_tokens(options, limits)


def check_rule(field: str, rule: int) -> Iterator[FieldViolation]:
    """At most one violation."""
    if rule not in set(Rule):
        yield FieldViolation(field, f"unknown rule {rule}; {', '.join(f'RULE_{known.name}' for known in Rule)}")


def check_ids(field: str, ids: Sequence[int], limits: Limits) -> Iterator[FieldViolation]:
    """At most one violation: the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        index, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        yield FieldViolation(f"{field}[{index}]", f"token id {wrong}; 0 to {limits.vocab_size - 1}, the vocabulary")


# What follows is written so that NaN, which compares false with everything, is caught by the same line.


def _law(o: Options) -> Iterator[FieldViolation]:
    if o.temperature is not None and not 0.0 <= o.temperature <= MAX_TEMPERATURE:
        yield FieldViolation("sampling.temperature", f"{_number(o.temperature)}; 0 to {MAX_TEMPERATURE:g}")
    if o.top_p is not None and not 0.0 < o.top_p <= 1.0:
        yield FieldViolation("sampling.top_p", f"{_number(o.top_p)}; above 0, at most 1")
    if o.top_k is not None and o.top_k < 0:
        yield FieldViolation("sampling.top_k", f"{o.top_k}; at least 0 (0 keeps all)")
    if o.min_p is not None and not 0.0 <= o.min_p <= 1.0:
        yield FieldViolation("sampling.min_p", f"{_number(o.min_p)}; 0 to 1")
    if o.priority is not None and not 0.0 < o.priority <= MAX_PRIORITY:
        yield FieldViolation("sampling.priority", f"{_number(o.priority)}; above 0, at most {MAX_PRIORITY:g}")


def _penalties(o: Options) -> Iterator[FieldViolation]:
    value, most = o.repetition_penalty, MAX_REPETITION_PENALTY
    if value is not None and not 0.0 < value <= most:
        yield FieldViolation("sampling.repetition_penalty", f"{_number(value)}; above 0, at most {most:g}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(o, name)
        if value is not None and not -MAX_PENALTY <= value <= MAX_PENALTY:
            yield FieldViolation(f"sampling.{name}", f"{_number(value)}; {-MAX_PENALTY:g} to {MAX_PENALTY:g}")


def _lengths(o: Options, limits: Limits) -> Iterator[FieldViolation]:
    if o.max_tokens is not None and o.max_tokens < 1:
        yield FieldViolation("sampling.max_tokens", f"{o.max_tokens}; at least 1")
    if o.min_tokens is not None:
        yield from check_min_tokens(o.min_tokens, o.max_tokens)
    if o.n is not None and not 1 <= o.n <= limits.max_answers:
        yield FieldViolation("sampling.n", f"{o.n}; 1 to {limits.max_answers}")
    if o.logprobs is not None and not 0 <= o.logprobs <= MAX_LOGPROBS:
        yield FieldViolation("sampling.logprobs", f"{o.logprobs}; 0 to {MAX_LOGPROBS}")
    if o.max_draft_tokens is not None and o.max_draft_tokens < 0:
        yield FieldViolation("sampling.max_draft_tokens", f"{o.max_draft_tokens}; at least 0 (0: no speculation)")


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> Iterator[FieldViolation]:
    """At most one violation; `max_tokens` None means that it is not known yet."""
    if min_tokens < 0:
        yield FieldViolation("sampling.min_tokens", f"{min_tokens}; at least 0")
    elif max_tokens is not None and 1 <= max_tokens < min_tokens:
        yield FieldViolation("sampling.min_tokens", f"{min_tokens}; at most {max_tokens}, which is max_tokens")


def _strings(name: str, strings: Sequence[str], most: int) -> Iterator[FieldViolation]:
    if len(strings) > most:
        yield FieldViolation(f"sampling.{name}", f"{len(strings)} strings; at most {most}")
    for index, text in enumerate(strings[:most]):
        size = len(text.encode())
        if not 1 <= size <= MAX_STRING_BYTES:
            reason = f"{size} bytes; 1 to {MAX_STRING_BYTES}" if size else f"is empty; 1 to {MAX_STRING_BYTES} bytes"
            yield FieldViolation(f"sampling.{name}[{index}]", reason)


def _biases(o: Options, limits: Limits) -> Iterator[FieldViolation]:
    if len(o.logit_bias) > MAX_BIASES:
        yield FieldViolation("sampling.logit_bias", f"{len(o.logit_bias)} ids; at most {MAX_BIASES}")
        return
    for token, bias in sorted(o.logit_bias.items()):
        field = f"sampling.logit_bias[{token}]"
        if not 0 <= token < limits.vocab_size:
            yield FieldViolation(field, f"token id {token}; 0 to {limits.vocab_size - 1}, the vocabulary")
        elif not -MAX_BIAS <= bias <= MAX_BIAS:
            yield FieldViolation(field, f"{_number(bias)}; {-MAX_BIAS:g} to {MAX_BIAS:g}")


def _first_tokens(o: Options, limits: Limits) -> Iterator[FieldViolation]:
    """Before min_tokens tokens no stop id may be produced: something else must be allowed."""
    if o.min_tokens is None or o.min_tokens < 1:
        return
    stops = {*o.stop_token_ids, *(() if o.ignore_eos else limits.eos_token_ids)}
    if stops.issuperset(o.allowed_token_ids or range(limits.vocab_size)):
        allowed = "the allowed_token_ids" if o.allowed_token_ids else "the vocabulary"
        reason = f"{o.min_tokens} tokens before a stop id, but {allowed} are all stop ids; at least 1 other is needed"
        yield FieldViolation("sampling.min_tokens", reason)


def _number(value: float) -> str:
    return f"{value:.7g}" if math.isfinite(value) else str(value)
