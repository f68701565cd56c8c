"""What is wrong with a request is said at once, all of it, naming field, value and limit."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from kadence import _status
from services.scheduler import validate
from services.scheduler.request import Ask, Limits, Options, Resume, Rule

LIMITS = Limits(model="tiny", vocab_size=100, max_model_len=32, max_prompt_bytes=500, default_max_tokens=16)
GOOD = Ask(prompt="hello")


def asked(**options: object) -> Ask:
    return replace(GOOD, options=Options(**options))  # type: ignore[arg-type]


def only(ask: Ask) -> tuple[str, str]:
    """The one violation as (field, description)."""
    found = validate.check(ask, LIMITS)
    assert len(found) == 1, found
    return found[0].field, found[0].description


BAD_ASKS = [
    (Ask(), "prompt", ["empty"]),
    (Ask(prompt=""), "prompt", ["empty"]),
    (Ask(prompt="x" * 501), "prompt", ["501", "500", "32"]),
    (Ask(prompt="ä" * 251), "prompt", ["502", "500"]),
    (Ask(prompt="a", prompt_token_ids=(1,)), "prompt_token_ids", ["prompt", "exactly one"]),
    (Ask(prompt="a", messages=(("user", "b"),)), "messages", ["prompt", "exactly one"]),
    (Ask(prompt="", messages=(("user", "b"),)), "messages", ["exactly one"]),
    (Ask(messages=(("user", "b"),), prompt_token_ids=(1,)), "prompt_token_ids", ["messages"]),
    (Ask(messages=(("user", "a"), ("robot", "b"))), "messages[1].role", ["robot", "system, user, assistant"]),
    (Ask(messages=(("", "b"),)), "messages[0].role", ["''"]),
    (Ask(messages=(("user", ""),)), "messages[0].content", ["empty"]),
    (Ask(messages=(("user", "x" * 300), ("user", "x" * 300))), "messages", ["600", "500"]),
    (Ask(messages=(("user", "x"),) * 33), "messages", ["33", "32"]),
    (Ask(prompt_token_ids=(1, 2, 100)), "prompt_token_ids[2]", ["100", "99"]),
    (Ask(prompt_token_ids=(-1,)), "prompt_token_ids[0]", ["-1", "0 to 99"]),
    (replace(GOOD, model="other"), "model", ["other", "tiny"]),
    (replace(GOOD, request_id="x" * 129), "request_id", ["129", "128"]),
    (replace(GOOD, request_id="a\nb"), "request_id", ["unprintable"]),
    (asked(temperature=-0.1), "sampling.temperature", ["-0.1", "0 to 100"]),
    (asked(temperature=math.nan), "sampling.temperature", ["nan", "100"]),
    (asked(temperature=math.inf), "sampling.temperature", ["inf", "100"]),
    (asked(temperature=1e30), "sampling.temperature", ["1e+30", "100"]),
    (asked(top_p=0.0), "sampling.top_p", ["0", "at most 1"]),
    (asked(top_p=1.5), "sampling.top_p", ["1.5", "at most 1"]),
    (asked(top_p=math.nan), "sampling.top_p", ["nan"]),
    (asked(top_k=-1), "sampling.top_k", ["-1", "at least 0"]),
    (asked(max_tokens=0), "sampling.max_tokens", ["0", "at least 1"]),
    (asked(max_tokens=-5), "sampling.max_tokens", ["-5"]),
    (asked(max_draft_tokens=-1), "sampling.max_draft_tokens", ["-1", "at least 0"]),
    (asked(priority=math.nan), "sampling.priority", ["nan"]),
    (asked(priority=0.0), "sampling.priority", ["0"]),
    (asked(stop=("x",) * 17), "sampling.stop", ["17", "16"]),
    (asked(stop=("x",) * 1000), "sampling.stop", ["1000", "16"]),
    (asked(stop=("a", "")), "sampling.stop[1]", ["empty", "256"]),
    (asked(stop=("x" * 257,)), "sampling.stop[0]", ["257", "256"]),
    (asked(stop_token_ids=(3, 100)), "sampling.stop_token_ids[1]", ["100", "99"]),
    (asked(stop_token_ids=(3,) * 65), "sampling.stop_token_ids", ["65", "64"]),
    (asked(rule=Rule.RATIO), "sampling.rule", ["RULE_RATIO", "not supported"]),
    (asked(rule=9), "sampling.rule", ["unknown rule 9"]),
    (asked(min_p=0.1), "sampling.min_p", ["0.1", "not supported by this version"]),
    (asked(min_p=math.nan), "sampling.min_p", ["nan", "not supported by this version"]),
    (asked(repetition_penalty=1.1), "sampling.repetition_penalty", ["not supported by this version"]),
    (asked(presence_penalty=0.5), "sampling.presence_penalty", ["not supported by this version"]),
    (asked(frequency_penalty=-0.5), "sampling.frequency_penalty", ["not supported by this version"]),
    (asked(min_tokens=3), "sampling.min_tokens", ["3", "not supported by this version"]),
    (asked(n=2), "sampling.n", ["2", "not supported by this version"]),
    (asked(n=0), "sampling.n", ["0", "not supported by this version"]),
    (asked(logit_bias={1: 2.0}), "sampling.logit_bias", ["not supported by this version"]),
    (asked(allowed_token_ids=(1,)), "sampling.allowed_token_ids", ["not supported by this version"]),
    (asked(bad_words=("x",)), "sampling.bad_words", ["not supported by this version"]),
    (asked(logprobs=0), "sampling.logprobs", ["0", "not supported by this version"]),
    (replace(GOOD, resume=Resume(token_ids=(100,))), "resume.token_ids[0]", ["100", "99"]),
    (replace(GOOD, resume=Resume(rule=Rule.RATIO)), "resume.rule", ["not supported"]),
    (replace(asked(seed=1), resume=Resume(seed=2)), "sampling.seed", ["1", "2"]),
]


@pytest.mark.parametrize(("ask", "field", "words"), BAD_ASKS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_wrong_thing_is_named(ask: Ask, field: str, words: list[str]) -> None:
    found_field, description = only(ask)
    assert found_field == field
    for word in words:
        assert word in description


def test_good_requests_pass() -> None:
    neutral = asked(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        max_tokens=1,
        ignore_eos=True,
        rule=Rule.MATCH,
        max_draft_tokens=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=-0.0,
        min_tokens=0,
        n=1,
        priority=1.0,
        stop=("x" * 256,) * 16,
        stop_token_ids=(0, 99),
    )
    chat = Ask(
        messages=(("system", ""), ("user", " "), ("assistant", ""), ("user", "b")), model="tiny", request_id="ä b"
    )
    for ask in (
        GOOD,
        asked(temperature=100.0, top_p=1e-6, top_k=2**31 - 1),
        neutral,
        chat,
        Ask(prompt_token_ids=(0, 99)),
    ):
        assert validate.check(ask, LIMITS) == []


def test_all_violations_travel_in_one_error() -> None:
    ask = Ask(model="x", options=Options(temperature=-1.0, top_p=2.0, top_k=-1, max_tokens=0, stop=("",)))
    error = validate.error(validate.check(ask, LIMITS))
    assert [v.field for v in error.violations] == [
        "model",
        "prompt",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.max_tokens",
        "sampling.stop[0]",
    ]
    assert "model" in error.message and "and 4 more" in error.message


def test_errors_fit_into_metadata() -> None:
    """HTTP/2 metadata holds 8 KiB, however much is wrong and however long it is."""
    huge = "🙂" * 100_000
    asks = [
        Ask(messages=((huge, huge),) * 32, model=huge, request_id=huge, options=Options(stop=("",) * 16)),
        Ask(prompt=huge, options=Options(stop=(huge,) * 16, stop_token_ids=(-1,) * 1000)),
    ]
    for ask in asks:
        error = validate.error(validate.check(ask, LIMITS))
        _, message, details = _status.encode(error)
        assert len(error.violations) == validate.MAX_VIOLATIONS
        assert len(message.encode()) + len(details) * 4 / 3 < 8192  # -bin metadata travels in base64


def test_a_huge_prompt_is_refused_fast() -> None:
    ask = Ask(prompt="x" * 10_000_000)
    began = time.perf_counter()
    assert only(ask)[0] == "prompt"
    assert time.perf_counter() - began < 0.5


def test_room_for_the_answer() -> None:
    def room(prompt: int, max_tokens: int | None, resumed: int = 0) -> tuple[int, list[str]]:
        resume = Resume(token_ids=(1,) * resumed) if resumed else None
        ask = replace(asked(max_tokens=max_tokens), resume=resume)
        tokens, wrong = validate.room(prompt, ask, LIMITS)
        return tokens, [f"{v.field}: {v.description}" for v in wrong]

    assert room(10, None) == (16, [])
    assert room(20, None) == (12, [])  # clipped to what is left
    assert room(31, None) == (1, [])
    assert room(16, 16) == (16, [])
    assert room(16, 16, resumed=16) == (16, [])
    assert "sampling.max_tokens: 17 and a prompt of 16 tokens make 33; at most 32" in room(16, 17)[1][0]
    assert "prompt: has 32 tokens; at most 31" in room(32, None)[1][0]
    assert "prompt: is empty" in room(0, None)[1][0]
    assert "resume.token_ids: 5 tokens; at most 4" in room(16, 4, resumed=5)[1][0]
