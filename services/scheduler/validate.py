"""Says what is wrong with a request, everything at once: field, value and limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kadence.errors import FieldViolation, InvalidRequestError
from services.scheduler.request import Ask, Limits, Options, Resume, Rule
from services.scheduler.validate_sampling import check_ids, check_min_tokens, check_rule, check_sampling

MAX_REQUEST_ID_BYTES = 128
MAX_ATTEMPT = 2**30  # every loss counts on from there, in 32 bits
ROLES = ("system", "user", "assistant")

# An error travels in HTTP/2 metadata, of which 8 KiB are safe.
MAX_VIOLATIONS = 16
_MAX_SHOWN = 64


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
    found += check_sampling(ask.options, limits)
    if ask.resume is not None:
        found += _resume(ask.resume, ask.options, limits)
    return found


def input_field(ask: Ask) -> str:
    """The field that holds the prompt."""
    if ask.messages:
        return "messages"
    return "prompt_token_ids" if ask.prompt_token_ids else "prompt"


def room(prompt_tokens: int, ask: Ask, limits: Limits) -> tuple[int, list[FieldViolation]]:
    """(max_tokens in effect, what is wrong with the lengths) for a prompt of that many tokens."""
    context, asked, field = limits.max_model_len, ask.options.max_tokens, input_field(ask)
    if prompt_tokens == 0:
        return 0, [FieldViolation(field, "is empty; at least 1 token")]
    if prompt_tokens >= context:
        reason = f"has {prompt_tokens} tokens; at most {context - 1}, one less than the context, for the answer"
        return 0, [FieldViolation(field, reason)]
    found: list[FieldViolation] = []
    if asked is None:
        asked = min(limits.default_max_tokens, context - prompt_tokens)
        found += check_min_tokens(max(0, ask.options.min_tokens or 0), asked)
    elif asked >= 1 and prompt_tokens + asked > context:
        reason = (
            f"{asked} and a prompt of {prompt_tokens} tokens make {prompt_tokens + asked}; "
            f"at most {context}, the context (so max_tokens at most {context - prompt_tokens})"
        )
        return asked, [FieldViolation("sampling.max_tokens", reason)]
    if asked >= 1 and ask.resume is not None:
        for name, ids in _held(ask.resume):
            if len(ids) > asked:
                found.append(FieldViolation(name, f"{len(ids)} tokens; at most {asked}, which is max_tokens"))
    return asked, found


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


def _resume(resume: Resume, options: Options, limits: Limits) -> Iterator[FieldViolation]:
    for name, ids in _held(resume):
        yield from check_ids(name, ids, limits)
    yield from check_rule("resume.rule", resume.rule)
    if resume.attempt > MAX_ATTEMPT:
        yield FieldViolation("resume.attempt", f"{resume.attempt}; at most {MAX_ATTEMPT}")
    n = max(1, options.n or 1)
    if len(resume.more) > n - 1:
        yield FieldViolation("resume.more", f"{len(resume.more)} answers; at most {n - 1}, as n is {n}")
    if options.seed is not None and options.seed != resume.seed:
        yield FieldViolation("sampling.seed", f"{options.seed}; the stream to resume had {resume.seed}")
    if {options.rule, resume.rule} == {Rule.MATCH, Rule.RATIO}:
        asked, had = Rule(options.rule).name, Rule(resume.rule).name
        yield FieldViolation("sampling.rule", f"RULE_{asked}; the stream to resume had RULE_{had}")


def _held(resume: Resume) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What the client holds of each answer, by field."""
    yield "resume.token_ids", resume.token_ids
    for index, ids in enumerate(resume.more):
        yield f"resume.more[{index}].token_ids", ids


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
