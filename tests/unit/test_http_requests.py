"""What posted JSON is taken to mean, what of it is refused under which name, and which status an error has."""

from __future__ import annotations

from typing import Any

import pytest

from kadence import errors as kadence_errors
from kadence.errors import BY_CODE, FieldViolation, InvalidRequestError, OverloadedError, UnavailableError
from services.scheduler.http import errors
from services.scheduler.http.requests import ChatRequest, CompletionRequest, parse
from services.scheduler.request import Options, Rule

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}


def params(cls: Any, body: Any) -> list[str]:
    """The fields that are refused."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(cls, body)
    return [violation.field for violation in caught.value.violations]


def test_nothing_said_is_nothing_decided() -> None:
    assert parse(ChatRequest, CHAT).options() == parse(CompletionRequest, TEXT).options() == Options(n=1)


# Fields that OpenAI documents and that would change the answer, each with values that would not.
LATER: dict[str, tuple[Any, list[Any]]] = {
    "audio": ({"voice": "x", "format": "wav"}, [None]),
    "best_of": (2, [1, None]),
    "echo": (True, [False, None]),
    "function_call": ("auto", ["none", None]),
    "functions": ([{"name": "f"}], [[], None]),
    "modalities": (["text", "audio"], [["text"], None]),
    "prediction": ({"type": "content", "content": "x"}, [None]),
    "reasoning_effort": ("high", ["none", None]),
    "response_format": ({"type": "json_schema", "json_schema": {}}, [{"type": "text"}, None]),
    "suffix": ("x", ["", None]),
    "tool_choice": ("auto", ["none", None]),
    "tools": ([{"type": "function"}], [[], None]),
    "verbosity": ("low", [None]),
    "web_search_options": ({}, [None]),
}


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_is_refused_and_its_absence_is_not(name: str) -> None:
    value, neutral = LATER[name]
    for cls, body in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        with pytest.raises(InvalidRequestError, match=f"{name}: .*not supported yet"):
            parse(cls, body | {name: value})  # type: ignore[type-var]
        for same in neutral:
            assert parse(cls, body | {name: same}) == parse(cls, body)  # type: ignore[type-var]


IGNORED = ("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")


@pytest.mark.parametrize("name", [*IGNORED, "service_tier", "store", "user"])
def test_what_cannot_change_the_answer_is_ignored(name: str) -> None:
    assert parse(ChatRequest, CHAT | {name: "x"}) == parse(ChatRequest, CHAT)


def test_refusals_read_well() -> None:
    body = TEXT | {"tools": [1], "response_format": {"type": "json_object"}, "best_of": 2, "n": 3, "echo": True}
    with pytest.raises(InvalidRequestError) as caught:
        parse(CompletionRequest, body)
    assert [f"{violation.field}: {violation.description}" for violation in caught.value.violations] == [
        "echo: true; not supported yet",
        'response_format: an object; not supported yet, only {"type": "text"} is',
        "tools: a list of 1; not supported yet",
        "best_of: 2; not supported yet, only n, 3 is",
    ]


def test_best_of_may_be_n() -> None:
    assert parse(CompletionRequest, TEXT | {"n": 3, "best_of": 3}).options().n == 3
    assert params(CompletionRequest, TEXT | {"n": 3, "best_of": 1}) == ["best_of"]
    with pytest.raises(InvalidRequestError) as caught:
        parse(CompletionRequest, TEXT | {"n": "x" * 100_000, "best_of": 1})
    assert len(str(caught.value)) < 400  # what the client sent is not sent back


def test_everything_wrong_is_told_at_once() -> None:
    body = {"temperature": "x", "tools": [1], "nn": 1, "stream": 1, "stop": [1], "kadence": {"rule": "x"}}
    assert sorted(params(ChatRequest, body)) == [
        *("kadence.rule", "messages", "nn", "stop[0]", "stream", "temperature", "tools"),
    ]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_prompts(prompt: Any, wanted: Any) -> None:
    assert parse(CompletionRequest, {"prompt": prompt}).prompts() == wanted


@pytest.mark.parametrize("prompt", [None, 1, [], [[]], [True], ["a", 1], [["a"]], [1.5], {}, ["x"] * 65, [[1], "a"]])
def test_wrong_prompts(prompt: Any) -> None:
    assert params(CompletionRequest, {"prompt": prompt}) == ["prompt"]


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [], "audio": None},
    ]
    asked = parse(ChatRequest, {"messages": messages})
    assert asked.conversation() == (("system", "be brief"), ("user", "ab"), ("assistant", ""))
    wrong = [
        {"role": "user", "content": "x", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": 5},
        {"content": "x"},
        {"role": "assistant", "tool_calls": [{}]},
        "x",
    ]
    fields = ["[0].tool_call_id", "[0].content", "[0].content", "[0].content", "[0].role", "[0]", "[0]"]
    for message, field in zip(wrong, fields, strict=True):
        assert params(ChatRequest, {"messages": [message]}) == [f"messages{field}"]


def test_what_is_wrong_a_million_times_is_told_once() -> None:
    many = [f"x{i}" for i in range(200_000)]
    assert params(ChatRequest, CHAT | dict.fromkeys(many, 1)) == ["body"]
    for name, value in {
        "stop_token_ids": many,
        "stop": [5] * 200_000,
        "messages": many,
        "kadence": dict.fromkeys(many, 1),
        "logit_bias": dict.fromkeys(many, 1),
    }.items():
        assert len(params(ChatRequest, CHAT | {name: value})) == 1
    assert [len(field) for field in params(ChatRequest, CHAT | {"x" * 1_000_000: 1})] == [64]


def test_seeds_of_either_sign() -> None:
    assert parse(ChatRequest, CHAT | {"seed": -1}).options().seed == 2**64 - 1
    assert parse(ChatRequest, CHAT | {"seed": 2**64 - 1}).options().seed == 2**64 - 1
    assert params(ChatRequest, CHAT | {"seed": 2**64}) == params(ChatRequest, CHAT | {"seed": -(2**63) - 1}) == ["seed"]


def test_own_and_further_options() -> None:
    own = {"max_draft_tokens": 2, "rule": "match", "priority": 2}
    options = parse(ChatRequest, CHAT | {"top_k": -1, "logit_bias": {"5": 1, "-1": 2}, "kadence": own}).options()
    assert (options.max_draft_tokens, options.rule, options.priority) == (2, Rule.MATCH, 2.0)
    assert options.top_k == 0 and options.logit_bias == {5: 1.0, -1: 2.0}
    assert parse(ChatRequest, CHAT | {"logprobs": True}).top() == 0
    assert parse(ChatRequest, CHAT | {"logprobs": False}).top() is None
    assert params(ChatRequest, CHAT | {"max_tokens": 1, "max_completion_tokens": 1}) == ["max_completion_tokens"]


def test_names_of_fields() -> None:
    asked = parse(ChatRequest, CHAT | {"max_completion_tokens": 5})
    wanted = {
        "sampling.max_tokens": "max_completion_tokens",
        "sampling.stop[3]": "stop[3]",
        "sampling.logprobs": "top_logprobs",
        "sampling.rule": "kadence.rule",
        "messages[1].role": "messages[1].role",
        "request_id": "x-request-id",
    }
    violations = tuple(FieldViolation(field, "9; at most 8") for field in wanted)
    error = errors.renamed(
        InvalidRequestError("sampling.max_tokens: 9; at most 8", violations=violations), asked.names()
    )
    assert [violation.field for violation in error.violations] == list(wanted.values())
    assert error.message == "max_completion_tokens: 9; at most 8"


def test_every_error_has_its_status() -> None:
    wanted = {
        "InvalidRequestError": 400,
        "AuthenticationError": 401,
        "PermissionDeniedError": 403,
        "NotFoundError": 404,
        "ConflictError": 409,
        "OverloadedError": 429,
        "RequestCancelledError": 499,
        "InternalError": 500,
        "UnsupportedError": 501,
        "UnavailableError": 503,
        "DeadlineExceededError": 504,
    }
    assert {cls.__name__ for cls in BY_CODE.values()} == set(wanted)
    for name, status in wanted.items():
        answer = errors.answer(getattr(kadence_errors, name)("it is so"))
        assert answer.status == status and answer.body["error"]["message"] == "it is so"
        assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_when_to_come_back() -> None:
    assert errors.answer(OverloadedError("x", retry_after=0.25)).headers == {
        "retry-after": "1",
        "retry-after-ms": "250",
    }
    assert errors.answer(UnavailableError("x")).headers["retry-after"] == "1"
