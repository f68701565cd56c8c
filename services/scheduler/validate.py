"""Says what is wrong with a request, everything at once: field, value and limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kadence.errors import FieldViolation, InvalidRequestError
from services.scheduler.request import Ask, Limits, Options, Resume, Rule

MAX_REQUEST_ID_BYTES = 128
MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 64
MAX_PRIORITY = 100.0
ROLES = ("system", "user", "assistant")

# An error travels in HTTP/2 metadata, of which 8 KiB are safe.
MAX_VIOLATIONS = 16
_MAX_SHOWN = 64

# Options of the contract that this version only accepts at the value that changes nothing.
_NEUTRAL = {
    "min_p": (0.0, "min_p"),
    "repetition_penalty": (1.0, "repetition penalty"),
    "presence_penalty": (0.0, "presence penalty"),
    "frequency_penalty": (0.0, "frequency penalty"),
    "min_tokens": (0, "min_tokens"),
    "n": (1, "more than one answer"),
}


def error(violations: Sequence[FieldViolation]) -> InvalidRequestError:
    """The one error that carries all `violations` (at least one)."""
    shown = list(violations[:MAX_VIOLATIONS])
    message = "; ".join(f"{v.field}: {v.description}" for v in shown[:3])
    if len(violations) > 3:
        message += f"; and {len(violations) - 3} more"
    return InvalidRequestError(message, violations=tuple(shown))


def check(ask: Ask, limits: Limits) -> list[FieldViolation]:
    """Everything that can be judged without a tokenizer. Its cost is bounded by the message, not by the context."""
    found: list[FieldViolation] = []
    found += _identity(ask, limits)
    found += _input(ask, limits)
    found += _sampling(ask.options)
    found += _stops(ask.options, limits)
    found += _later(ask.options)
    if ask.resume is not None:
        found += _resume(ask.resume, ask.options, limits)
    return found


def input_field(ask: Ask) -> str:
    """The field that holds the prompt."""
    if ask.messages:
        return "messages"
    return "prompt_token_ids" if ask.prompt_token_ids else "prompt"


def room(prompt_tokens: int, ask: Ask, limits: Limits) -> tuple[int, list[FieldViolation]]:
    """(max_tokens in effect, what is wrong with the length) for a prompt of that many tokens."""
    context, asked, field = limits.max_model_len, ask.options.max_tokens, input_field(ask)
    resumed = len(ask.resume.token_ids) if ask.resume is not None else 0
    if prompt_tokens == 0:
        return 0, [FieldViolation(field, "is empty; at least 1 token")]
    if prompt_tokens >= context:
        reason = f"has {prompt_tokens} tokens; at most {context - 1}, one less than the context, for the answer"
        return 0, [FieldViolation(field, reason)]
    if asked is None:
        asked = min(limits.default_max_tokens, context - prompt_tokens)
    elif asked >= 1 and prompt_tokens + asked > context:
        reason = (
            f"{asked} and a prompt of {prompt_tokens} tokens make {prompt_tokens + asked}; "
            f"at most {context}, the context (so max_tokens at most {context - prompt_tokens})"
        )
        return asked, [FieldViolation("sampling.max_tokens", reason)]
    if asked >= 1 and resumed > asked:
        return asked, [FieldViolation("resume.token_ids", f"{resumed} tokens; at most {asked}, which is max_tokens")]
    return asked, []


def _identity(ask: Ask, limits: Limits) -> Iterator[FieldViolation]:
    size = len(ask.request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        yield FieldViolation("request_id", f"{size} bytes; at most {MAX_REQUEST_ID_BYTES}")
    elif not ask.request_id.isprintable():
        yield FieldViolation("request_id", f"{_shown(ask.request_id)} has unprintable characters")
    if ask.model and ask.model != limits.model:
        yield FieldViolation("model", f"unknown model {_shown(ask.model)}; served: {_shown(limits.model)}")


def _input(ask: Ask, limits: Limits) -> Iterator[FieldViolation]:
    given = {
        "prompt": ask.prompt is not None,
        "messages": bool(ask.messages),
        "prompt_token_ids": bool(ask.prompt_token_ids),
    }
    names = [name for name, there in given.items() if there]
    if not names:
        yield FieldViolation("prompt", f"is empty; exactly one of {', '.join(given)} must be set")
    if len(names) > 1:
        yield FieldViolation(names[1], f"set beside {names[0]}; exactly one of {', '.join(given)} may be set")
    if ask.prompt is not None:
        if not ask.prompt and len(names) == 1:
            yield FieldViolation("prompt", "is empty; at least 1 character")
        yield from _size("prompt", len(ask.prompt.encode()), limits)
    yield from _messages(ask.messages, limits)
    yield from check_ids("prompt_token_ids", ask.prompt_token_ids, limits)


def _messages(messages: Sequence[tuple[str, str]], limits: Limits) -> Iterator[FieldViolation]:
    if len(messages) > limits.max_model_len:
        yield FieldViolation("messages", f"{len(messages)} messages; at most {limits.max_model_len}, the context")
        return
    for index, (role, content) in enumerate(messages):
        if role not in ROLES:
            yield FieldViolation(f"messages[{index}].role", f"unknown role {_shown(role)}; one of {', '.join(ROLES)}")
        elif role == "user" and not content:
            yield FieldViolation(f"messages[{index}].content", "is empty; a user message needs at least 1 character")
    yield from _size("messages", sum(len(content.encode()) for _, content in messages), limits)


def _size(field: str, size: int, limits: Limits) -> Iterator[FieldViolation]:
    if size > limits.max_prompt_bytes:
        limit = f"{limits.max_prompt_bytes}, all that a context of {limits.max_model_len} tokens can hold"
        yield FieldViolation(field, f"{size} bytes; at most {limit}")


def check_ids(field: str, ids: Sequence[int], limits: Limits) -> Iterator[FieldViolation]:
    """At most one violation: the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        index, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        yield FieldViolation(f"{field}[{index}]", f"token id {wrong}; 0 to {limits.vocab_size - 1}, the vocabulary")


def _sampling(options: Options) -> Iterator[FieldViolation]:
    o = options
    # Written so that NaN, which compares false with everything, is caught by the same line.
    if o.temperature is not None and not 0.0 <= o.temperature <= MAX_TEMPERATURE:
        yield FieldViolation("sampling.temperature", f"{_number(o.temperature)}; 0 to {MAX_TEMPERATURE:g}")
    if o.top_p is not None and not 0.0 < o.top_p <= 1.0:
        yield FieldViolation("sampling.top_p", f"{_number(o.top_p)}; above 0, at most 1")
    if o.top_k is not None and o.top_k < 0:
        yield FieldViolation("sampling.top_k", f"{o.top_k}; at least 0 (0 keeps all)")
    if o.max_tokens is not None and o.max_tokens < 1:
        yield FieldViolation("sampling.max_tokens", f"{o.max_tokens}; at least 1")
    if o.max_draft_tokens is not None and o.max_draft_tokens < 0:
        yield FieldViolation("sampling.max_draft_tokens", f"{o.max_draft_tokens}; at least 0 (0: no speculation)")
    if o.priority is not None and not 0.0 < o.priority <= MAX_PRIORITY:
        yield FieldViolation("sampling.priority", f"{_number(o.priority)}; above 0, at most {MAX_PRIORITY:g}")
    yield from _rule("sampling.rule", o.rule)


def _rule(field: str, rule: int) -> Iterator[FieldViolation]:
    if rule == Rule.RATIO:
        yield FieldViolation(field, "RULE_RATIO is not supported by this version; RULE_MATCH is")
    elif rule not in (Rule.UNSPECIFIED, Rule.MATCH):
        yield FieldViolation(field, f"unknown rule {rule}; RULE_UNSPECIFIED or RULE_MATCH")


def _stops(options: Options, limits: Limits) -> Iterator[FieldViolation]:
    if len(options.stop) > MAX_STOP_STRINGS:
        yield FieldViolation("sampling.stop", f"{len(options.stop)} strings; at most {MAX_STOP_STRINGS}")
    for index, text in enumerate(options.stop[:MAX_STOP_STRINGS]):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            reason = f"{size} bytes; 1 to {MAX_STOP_BYTES}" if size else f"is empty; 1 to {MAX_STOP_BYTES} bytes"
            yield FieldViolation(f"sampling.stop[{index}]", reason)
    if len(options.stop_token_ids) > MAX_STOP_IDS:
        yield FieldViolation("sampling.stop_token_ids", f"{len(options.stop_token_ids)} ids; at most {MAX_STOP_IDS}")
    yield from check_ids("sampling.stop_token_ids", options.stop_token_ids, limits)


def _later(options: Options) -> Iterator[FieldViolation]:
    for name, (neutral, what) in _NEUTRAL.items():
        value = getattr(options, name)
        if value is not None and value != neutral:
            reason = f"{_number(value)}; {what} is not supported by this version, only {neutral:g}"
            yield FieldViolation(f"sampling.{name}", reason)
    for name in ("logit_bias", "allowed_token_ids", "bad_words"):
        if getattr(options, name):
            reason = f"{len(getattr(options, name))} entries; not supported by this version, only none"
            yield FieldViolation(f"sampling.{name}", reason)
    if options.logprobs is not None:
        yield FieldViolation("sampling.logprobs", f"{options.logprobs}; not supported by this version, leave it out")


def _resume(resume: Resume, options: Options, limits: Limits) -> Iterator[FieldViolation]:
    yield from check_ids("resume.token_ids", resume.token_ids, limits)
    yield from _rule("resume.rule", resume.rule)
    if options.seed is not None and options.seed != resume.seed:
        yield FieldViolation("sampling.seed", f"{options.seed}; the stream to resume had {resume.seed}")


def _number(value: float) -> str:
    return f"{value:.7g}" if math.isfinite(value) else str(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
