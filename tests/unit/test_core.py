"""The SDK's core without I/O: requests, answers, time and retries, endpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import kadence
from kadence import _convert, _core, _state, types
from kadence._core import Verdict
from kadence.errors import (
    APIError,
    ConfigError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from kadence.types import GenerateOptions, RetryConfig, SamplingOptions
from kadence.v1 import inference_pb2, types_pb2

# A value other than the proto's zero for each sampling option.
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 3,
    "min_p": 0.125,
    "seed": 2**64 - 1,
    "max_tokens": 5,
    "min_tokens": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [4, 5],
    "ignore_eos": True,
    "rule": "ratio",
    "max_draft_tokens": 0,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: -1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "n": 3,
    "logprobs": 2,
    "priority": 2.0,
}


def test_exports_are_complete() -> None:
    assert all(hasattr(kadence, name) for name in kadence.__all__)
    public = {
        name
        for name in vars(types)
        if isinstance(vars(types)[name], type) and vars(types)[name].__module__ == types.__name__
    }
    tree = [kadence.KadenceError, *_subclasses(kadence.KadenceError)]
    errors = {error.__name__ for error in tree if error.__module__.startswith("kadence.")}
    assert public | errors <= set(kadence.__all__)


def _subclasses(of: type) -> list[type]:
    children: list[type] = of.__subclasses__()
    return [found for child in children for found in (child, *_subclasses(child))]


def test_every_sampling_option_travels() -> None:
    assert SAMPLING.keys() == SamplingOptions.__annotations__.keys()
    message = _convert.request("p", SAMPLING).sampling
    for name, value in SAMPLING.items():
        sent = getattr(message, name)
        if name == "rule":
            assert sent == types_pb2.RULE_RATIO
        elif isinstance(value, list | dict):
            assert type(value)(sent) == value
        else:
            assert sent == value and message.HasField(name)


def test_every_field_of_the_message_is_an_option() -> None:
    assert set(types_pb2.SamplingOptions.DESCRIPTOR.fields_by_name) == SamplingOptions.__annotations__.keys()


def test_absent_and_none_stay_absent() -> None:
    message = _convert.request(None, dict.fromkeys(GenerateOptions.__annotations__))
    assert message == inference_pb2.GenerateRequest(sampling=types_pb2.SamplingOptions())
    assert _convert.request("", {}).HasField("prompt")


def test_conversations_and_ids() -> None:
    messages = [types.Message("system", "S"), {"role": "user", "content": "U"}]
    request = _convert.request(None, {"messages": messages, "request_id": "r", "model": "m"})
    assert [(m.role, m.content) for m in request.messages] == [("system", "S"), ("user", "U")]
    assert (request.request_id, request.model, request.HasField("prompt")) == ("r", "m", False)
    assert list(_convert.request(None, {"prompt_token_ids": (1, 2)}).prompt_token_ids) == [1, 2]
    assert list(_convert.request("p", {"stop": "END"}).sampling.stop) == ["END"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"top_k": 2**40}, "sampling.top_k"),
        ({"top_k": [1]}, "sampling.top_k"),
        ({"seed": -1}, "sampling.seed"),
        ({"stop_token_ids": 5}, "sampling.stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "sampling.stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "sampling.logit_bias"),
        ({"rule": "magic"}, "sampling.rule"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user", "text": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ],
)
def test_wrong_types_name_the_field(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _convert.request(None, options)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert "\n" not in str(caught.value)


INT32, UINT64 = "0 to 2147483647", "0 to 18446744073709551615"
FLOAT = "0, or 1.4e-45 to 3.4e38 in size (32-bit floating point)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, f"sampling.seed: -1; {UINT64}"),
        ({"seed": 2**64}, f"sampling.seed: {2**64}; {UINT64}"),
        ({"seed": 1 << 20_000}, f"sampling.seed: a huge number; {UINT64}"),
        ({"max_tokens": "x"}, "sampling.max_tokens: 'x'; a whole number"),
        ({"max_tokens": 1.5}, "sampling.max_tokens: 1.5; a whole number"),
        ({"max_tokens": True}, "sampling.max_tokens: True; a whole number"),
        ({"top_k": 2**31}, f"sampling.top_k: {2**31}; {INT32}"),
        ({"ignore_eos": "x"}, "sampling.ignore_eos: 'x'; true or false"),
        ({"rule": ["match"]}, "sampling.rule: ['match'] is not one of match, ratio"),
        ({"stop": 5}, "sampling.stop: 5; a list of strings"),
        ({"stop": ["a", 5]}, "sampling.stop: string 1 is 5; a string"),
        ({"stop_token_ids": "5"}, "sampling.stop_token_ids: '5'; a list of token ids"),
        ({"prompt_token_ids": [1, 2**31]}, f"prompt_token_ids: token 1 is {2**31}; {INT32}"),
        ({"prompt_token_ids": [1, 2, None]}, "prompt_token_ids: token 2 is None; a whole number"),
        ({"prompt_token_ids": 5}, "prompt_token_ids: 5; a list of token ids"),
        ({"logit_bias": 5}, "sampling.logit_bias: 5; an object of token ids and numbers"),
        ({"logit_bias": {"a": 1}}, "sampling.logit_bias: token id 'a'; a whole number"),
        ({"logit_bias": {3: 1e39}}, f"sampling.logit_bias: the number for token id 3 is 1e+39; {FLOAT}"),
        ({"messages": 5}, "messages: 5; a list of messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content: ['x']; a string"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: None; a string"),
        ({"model": b"m"}, "model: b'm'; a string"),
        ({"temperature": "hot"}, "sampling.temperature: 'hot'; a number"),
        ({"temperature": 1e39}, f"sampling.temperature: 1e+39; {FLOAT}"),
        ({"temperature": 1e-50}, f"sampling.temperature: 1e-50; {FLOAT}"),
    ],
)
def test_what_does_not_fit_names_field_value_and_limit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _convert.request(None, options)
    assert str(caught.value) == message


def test_a_prompt_is_a_string() -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt: 5; a string$"):
        _convert.request(5, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"^prompt: .* surrogates$"):
        _convert.request("\ud800", {})


@pytest.mark.parametrize(
    ("field", "prompt", "options"),
    [
        ("prompt", "é" * 2**24, {}),
        ("messages", None, {"messages": [{"role": "user", "content": "a" * 2**25}]}),
        ("prompt_token_ids", None, {"prompt_token_ids": [2**31 - 1] * 7_000_000}),
    ],
)
def test_a_request_too_large_to_send_names_field_size_and_limit(
    field: str, prompt: str | None, options: dict[str, Any]
) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"^{field}: \d+ bytes make a request of \d+ bytes; at most 33554432$"
    ):
        _core.prepare(_core.Settings(), prompt, options)


def test_only_an_answer_counts_as_one() -> None:
    details = ((_core._status.DETAILS_KEY, b""),)
    for trailing, request_id, answered in ((None, "", False), ((), "", False), (details, "", True), (None, "r", True)):
        error = _core.error_of("UNAVAILABLE", "gone", trailing, request_id)
        assert isinstance(error, UnavailableError) and error.answered is answered


def test_a_deadline_of_our_own_is_told_in_our_own_words() -> None:
    details = ((_core._status.DETAILS_KEY, b""),)
    assert str(_core.error_of("DEADLINE_EXCEEDED", "Stream removed (Deadline Exceeded)", None)) == (
        "the request's time was up"
    )
    assert str(_core.error_of("DEADLINE_EXCEEDED", "the server's words", details)) == "the server's words"


def test_a_huge_value_is_not_echoed() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _convert.request(None, {"model": b"\xff" * 1_000_000})
    assert len(str(caught.value)) < 400


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        _convert.request("p", {"max_new_tokens": 3})


def delays(
    errors: list[APIError], retry: RetryConfig, timeout: float = 100.0, chance: float = 0.5
) -> list[float | None]:
    course = _core.Course(timeout, retry, now=0.0)
    return [course.delay_after(error, _core.verdict(error, False), 0.0, chance) for error in errors]


def test_back_off_grows_to_a_limit_and_ends() -> None:
    retry = RetryConfig(attempts=5, initial_delay=1.0, multiplier=3.0, max_delay=5.0, jitter=0.0)
    assert delays([UnavailableError("x")] * 5, retry) == [1.0, 3.0, 5.0, 5.0, None]
    assert delays([UnavailableError("x")], RetryConfig(attempts=1)) == [None]


def test_jitter_spreads_around_the_delay() -> None:
    retry = RetryConfig(initial_delay=1.0, jitter=0.2)
    low, high = (delays([UnavailableError("x")], retry, chance=chance)[0] for chance in (0.0, 0.999))
    assert low == pytest.approx(0.8) and high == pytest.approx(1.2, abs=1e-3)


def test_only_what_may_pass_is_retried() -> None:
    retry = RetryConfig(initial_delay=0.5, max_delay=5.0, jitter=0.0)
    assert delays([OverloadedError("busy", retry_after=2.0)], retry) == [2.0]
    assert delays([OverloadedError("busy", retry_after=0.1)], retry) == [0.5]
    assert delays([OverloadedError("busy", retry_after=60.0)], retry) == [None]
    assert delays([OverloadedError("message too large", retry_after=0.0)], retry) == [None]
    for error in (NotFoundError("x"), InvalidRequestError("x"), InternalError("x")):
        assert delays([error], retry) == [None]


def test_no_retry_out_of_time() -> None:
    course = _core.Course(10.0, RetryConfig(initial_delay=1.0), now=100.0)
    assert course.delay_after(UnavailableError("x"), Verdict.RETRY, 109.5, 0.5) is None
    assert (course.remaining(104.0), course.remaining(111.0)) == (6.0, 0.0)


def test_timeouts_are_finite() -> None:
    settings = _core.Settings(timeout=12.0)
    assert _core.Settings().call_timeout(None) == _core.DEFAULT_TIMEOUT
    assert (settings.call_timeout(None), settings.call_timeout(3), settings.call_timeout(None, 10.0)) == (
        12.0,
        3.0,
        10.0,
    )
    assert settings.call_timeout(_core.MAX_TIMEOUT) == 30 * 24 * 3600
    with pytest.raises(InvalidRequestError) as caught:
        settings.call_timeout(9e9)
    limit = "a number of seconds above 0 and at most 2592000 (30 days)"
    assert str(caught.value) == f"timeout: 9000000000.0; {limit}"
    for wrong in (0, -1, math.inf, math.nan, "5", 1e300, 10**400, True):
        with pytest.raises(InvalidRequestError, match="timeout"):
            settings.call_timeout(wrong)  # type: ignore[arg-type]


def test_metadata_is_merged_and_checked() -> None:
    settings = _core.Settings(metadata={"a": "1", "b": "1"})
    assert dict(settings.call_metadata({"b": "2"})) == {"a": "1", "b": "2"}
    for wrong in ({"Upper": "x"}, {"": "x"}, {"k-bin": "x"}, {"k": "ü"}, {"k": 1}, {"k": "a\nb"}):
        with pytest.raises(InvalidRequestError, match="metadata"):
            settings.call_metadata(wrong)  # type: ignore[arg-type]


def test_a_proxy_is_ignored_on_this_machine_only() -> None:
    for local in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert ("grpc.enable_http_proxy", 0) in _core.channel_options(local)
    assert ("grpc.enable_http_proxy", 0) not in _core.channel_options("scheduler.example:1")


def test_endpoint_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KADENCE_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="kadence up"):
        _state.find_endpoint(None)
    _state.write_state({"endpoint": "127.0.0.1:1"})
    assert _state.find_endpoint(None) == "127.0.0.1:1"
    monkeypatch.setenv("KADENCE_ENDPOINT", "h:2")
    assert _state.find_endpoint(None) == "h:2"
    assert _state.find_endpoint("[::1]:3") == "[::1]:3"
    _state.remove_state()
    _state.remove_state()
    assert _state.read_state() is None
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("endpoint", ["host", ":1", "host:", "host:0", "host:65536", "http://host:1", "host:x"])
def test_malformed_endpoints(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        _state.find_endpoint(endpoint)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_state_file_is_one_clear_line(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path))
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cluster\.json") as caught:
        _state.read_state()
    assert "\n" not in str(caught.value)
