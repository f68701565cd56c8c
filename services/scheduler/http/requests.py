"""What a client may post: OpenAI's fields, vLLM's further ones beside them, and Kadence's own under "kadence".

Defaults are Kadence's, not OpenAI's: what a request leaves out comes from the model's generation config, else it is
greedy; max_tokens is the server's default for completions too. `null` is the same as leaving a field out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, FailFast, Field, ValidationError

from kadence.errors import FieldViolation
from services.scheduler import validate
from services.scheduler.http import fields
from services.scheduler.http.fields import Biases, Ids, Int, Number, Strict, Strings, Text
from services.scheduler.request import Options, Rule

MAX_PROMPTS = 64
_SEED_LOWEST, _SEED_END = -(2**63), 2**64  # OpenAI's seeds are signed, ours are not

# Fields of OpenAI's that cannot change the answer here.
_IGNORED = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "store", "user"}
)
# Fields that would change the answer, and the values of them that would not.
_LATER: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_LATER_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"audio": (), "function_call": (), "tool_calls": ([],)}
_ROLES = {"developer": "system"}  # OpenAI's newer name

R = TypeVar("R", bound="Request")


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Ignored: nothing is padded."""


class Extensions(Strict):
    """What only Kadence has."""

    max_draft_tokens: Int | None = None
    rule: Literal["match", "ratio"] | None = None
    priority: Number | None = None


class Request(Strict):
    """The fields that both kinds of completions share."""

    model: Text = ""
    """May be left out: one model is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Int = 1
    seed: int | None = None
    stop: Strings = Field(default_factory=list)
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases = Field(default_factory=dict)
    top_k: Int | None = None
    """-1, as in vLLM, keeps all, as 0 does."""
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Int | None = None
    stop_token_ids: Ids = Field(default_factory=list)
    ignore_eos: bool | None = None
    allowed_token_ids: Ids = Field(default_factory=list)
    bad_words: Strings = Field(default_factory=list)
    kadence: Extensions = Extensions()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def wrong(self) -> list[FieldViolation]:
        """What is wrong between fields."""
        found = []
        if self.stream_options is not None and not self.stream:
            found.append(FieldViolation("stream_options", "only allowed where stream is true"))
        if self.seed is not None and not _SEED_LOWEST <= self.seed < _SEED_END:
            found.append(FieldViolation("seed", f"{fields.shown(self.seed)}; an integer of 64 bits"))
        return found

    def most_tokens(self) -> int | None:
        """Tokens to produce, as asked."""
        return self.max_tokens

    def top(self) -> int | None:
        """How many log-probabilities are wanted beside the chosen one's; None: not even that."""
        return None

    def names(self) -> dict[str, str]:
        """Where this request holds what the SDK calls by another name."""
        return {name: f"kadence.{name}" for name in Extensions.model_fields} | {"request_id": "x-request-id"}

    def options(self) -> Options:
        """Sampling as asked."""
        own = self.kadence
        return Options(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            seed=None if self.seed is None else self.seed % _SEED_END,
            max_tokens=self.most_tokens(),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            rule=Rule.UNSPECIFIED if own.rule is None else Rule[own.rule.upper()],
            max_draft_tokens=own.max_draft_tokens,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(self.logit_bias),
            allowed_token_ids=tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            min_tokens=self.min_tokens,
            n=self.n,
            logprobs=self.top(),
            priority=own.priority,
        )


def _prompts(value: Any) -> list[str | tuple[int, ...]]:
    """Text, a list of texts, ids or a list of lists of ids, as a list of prompts. Raises ValueError."""
    if isinstance(value, str):
        return [fields.text(value)]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [tuple(value)]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"{len(value)} prompts; at most {MAX_PROMPTS}")
        if all(isinstance(item, str) for item in value):
            return [fields.text(item) for item in value]
        if all(isinstance(item, list) and item and _are_ids(item) for item in value):
            return [tuple(item) for item in value]
    raise ValueError(f"{fields.shown(value)}; a string, a list of strings, token ids, or a list of lists of token ids")


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    logprobs: Int | None = None

    def top(self) -> int | None:
        """As asked."""
        return self.logprobs

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, in order."""
        given: list[str | tuple[int, ...]] = self.prompt
        return given


def _content(value: Any) -> Any:
    """The text of a message's content, which may come in parts. Raises ValueError."""
    if not isinstance(value, list):
        return value
    joined = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or not isinstance(kind, str):
            raise ValueError(f"part {index} is {fields.shown(part)}; an object with a type")
        if kind != "text":
            raise ValueError(f"part {index} is of type {fields.shown(kind)}, which is not supported yet; only text is")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} has no text")
        joined.append(part["text"])
    return "".join(joined)


class Message(Strict):
    """One message of a conversation."""

    role: Text
    content: Annotated[Text, BeforeValidator(_content)] = ""
    name: Any = None
    """Ignored: chat templates take none."""
    refusal: Any = None
    """Ignored, as annotations are: answers bring both, and are sent back as they came."""
    annotations: Any = None


def _message(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if wrong := next(_not_yet(value, _LATER_IN_MESSAGE), None):
        raise ValueError(f"{wrong.field}: {wrong.description}")
    return {key: item for key, item in value.items() if item is not None and key not in _LATER_IN_MESSAGE}


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Annotated[Message, BeforeValidator(_message)]], FailFast()]
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None

    def wrong(self) -> list[FieldViolation]:
        """What is wrong between fields."""
        found = super().wrong()
        if not self.messages:
            found.append(FieldViolation("messages", "is empty; at least 1 message"))
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            found.append(FieldViolation("max_completion_tokens", "set beside max_tokens; only one of them may be"))
        if self.top_logprobs is not None and not self.logprobs:
            found.append(FieldViolation("top_logprobs", "only allowed where logprobs is true"))
        return found

    def most_tokens(self) -> int | None:
        """By the newer name or the older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top(self) -> int | None:
        """0 where only the chosen tokens' are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def names(self) -> dict[str, str]:
        """Where this request holds what the SDK calls by another name."""
        newer = {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
        return super().names() | {"logprobs": "top_logprobs"} | newer

    def conversation(self) -> tuple[tuple[str, str], ...]:
        """(role, content) pairs."""
        return tuple((_ROLES.get(message.role, message.role), message.content) for message in self.messages)


def parse(cls: type[R], body: Any) -> R:
    """The request that a JSON body holds. Raises InvalidRequestError with everything that is wrong."""
    if not isinstance(body, Mapping):
        raise validate.error([FieldViolation("body", f"{fields.shown(body)}; a JSON object")])
    later = _LATER | {"best_of": (body.get("n") or 1,)}
    found = list(_not_yet(body, later))
    used = {k: v for k, v in body.items() if v is not None and k not in _IGNORED and k not in later}
    try:
        request = cls.model_validate(used)
    except ValidationError as error:
        raise validate.error(fields.violations(error, cls.model_fields) + found) from None
    found += request.wrong()
    if found:
        raise validate.error(found)
    return request


def _not_yet(given: Mapping[str, Any], later: Mapping[str, tuple[Any, ...]]) -> Any:
    """A violation for each field of `later` that has another than its neutral values."""
    for name, neutral in later.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            same = [json.dumps(item) for item in neutral if item]
            if name == "best_of":  # its neutral value is the client's own
                same = [f"n, {fields.shown(neutral[0])}"]
            but = f", only {same[0]} is" if same else ""
            yield FieldViolation(name, f"{fields.shown(value)}; not supported yet{but}")
