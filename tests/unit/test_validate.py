"""What is wrong with a request is said at once, all of it, naming field, value and limit."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from kadence import _status
from services.scheduler import validate
from services.scheduler.request import Ask, Limits, Options, Resume, Rule

LIMITS = Limits(
    model="tiny",
    vocab_size=100,
    max_model_len=32,
    max_prompt_bytes=500,
    default_max_tokens=16,
    eos_token_ids=(1, 2),
)
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
    (asked(rule=9), "sampling.rule", ["unknown rule 9", "RULE_MATCH", "RULE_RATIO"]),
    (asked(min_p=-0.1), "sampling.min_p", ["-0.1", "0 to 1"]),
    (asked(min_p=1.5), "sampling.min_p", ["1.5", "0 to 1"]),
    (asked(min_p=math.nan), "sampling.min_p", ["nan"]),
    (asked(repetition_penalty=0.0), "sampling.repetition_penalty", ["0", "above 0, at most 2"]),
    (asked(repetition_penalty=2.1), "sampling.repetition_penalty", ["2.1", "at most 2"]),
    (asked(repetition_penalty=math.inf), "sampling.repetition_penalty", ["inf"]),
    (asked(presence_penalty=-2.5), "sampling.presence_penalty", ["-2.5", "-2 to 2"]),
    (asked(presence_penalty=math.nan), "sampling.presence_penalty", ["nan"]),
    (asked(frequency_penalty=2.5), "sampling.frequency_penalty", ["2.5", "-2 to 2"]),
    (asked(min_tokens=-1), "sampling.min_tokens", ["-1", "at least 0"]),
    (asked(min_tokens=5, max_tokens=4), "sampling.min_tokens", ["5", "at most 4", "max_tokens"]),
    (asked(n=0), "sampling.n", ["0", "1 to 64"]),
    (asked(n=65), "sampling.n", ["65", "1 to 64"]),
    (asked(logprobs=-1), "sampling.logprobs", ["-1", "0 to 20"]),
    (asked(logprobs=21), "sampling.logprobs", ["21", "0 to 20"]),
    (asked(logit_bias=dict.fromkeys(range(1025), 0.0)), "sampling.logit_bias", ["1025 ids", "1024"]),
    (asked(logit_bias={5: 1.0, 100: 1.0}), "sampling.logit_bias[100]", ["100", "0 to 99", "vocabulary"]),
    (asked(logit_bias={-1: 1.0}), "sampling.logit_bias[-1]", ["-1", "0 to 99"]),
    (asked(logit_bias={5: -100.5}), "sampling.logit_bias[5]", ["-100.5", "-100 to 100"]),
    (asked(logit_bias={5: math.nan}), "sampling.logit_bias[5]", ["nan"]),
    (asked(logit_bias={5: math.inf}), "sampling.logit_bias[5]", ["inf"]),
    (asked(allowed_token_ids=(3, 100)), "sampling.allowed_token_ids[1]", ["100", "99"]),
    (asked(bad_words=("x",) * 65), "sampling.bad_words", ["65", "64"]),
    (asked(bad_words=("a", "")), "sampling.bad_words[1]", ["empty", "256"]),
    (asked(bad_words=("ä" * 129,)), "sampling.bad_words[0]", ["258", "256"]),
    # Nothing but stop ids could come first.
    (asked(min_tokens=1, allowed_token_ids=(1, 2)), "sampling.min_tokens", ["allowed_token_ids", "stop ids"]),
    (
        asked(min_tokens=2, allowed_token_ids=(1, 7), stop_token_ids=(7,)),
        "sampling.min_tokens",
        ["2 tokens", "at least 1 other"],
    ),
    (
        asked(min_tokens=1, allowed_token_ids=(1, 7), stop_token_ids=(1, 7), ignore_eos=True),
        "sampling.min_tokens",
        ["allowed_token_ids"],
    ),
    (replace(asked(n=3), resume=Resume(more=((1,), (100,)))), "resume.more[1].token_ids[0]", ["100", "0 to 99"]),
    (replace(asked(n=2), resume=Resume(more=((1,), (2,)))), "resume.more", ["2 answers", "at most 1", "n is 2"]),
    (replace(GOOD, resume=Resume(more=((),))), "resume.more", ["1 answers", "at most 0"]),
    (replace(GOOD, resume=Resume(token_ids=(100,))), "resume.token_ids[0]", ["100", "99"]),
    (replace(GOOD, resume=Resume(rule=7)), "resume.rule", ["unknown rule 7"]),
    (
        replace(asked(rule=Rule.MATCH), resume=Resume(rule=Rule.RATIO)),
        "sampling.rule",
        ["RULE_MATCH", "stream to resume had RULE_RATIO"],
    ),
    (replace(GOOD, resume=Resume(attempt=2**32 - 1)), "resume.attempt", ["4294967295", "at most 1073741824"]),
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
        logit_bias={},
        priority=1.0,
        stop=("x" * 256,) * 16,
        stop_token_ids=(0, 99),
    )
    furthest = asked(
        max_tokens=8,
        min_tokens=8,
        min_p=1.0,
        repetition_penalty=2.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, 99: 100.0},
        allowed_token_ids=(1, 2, 3),
        bad_words=("x" * 256,) * 64,
        n=64,
        logprobs=20,
    )
    only_ends = asked(min_tokens=1, allowed_token_ids=(1, 2), ignore_eos=True)
    chat = Ask(
        messages=(("system", ""), ("user", " "), ("assistant", ""), ("user", "b")), model="tiny", request_id="ä b"
    )
    for ask in (
        GOOD,
        asked(temperature=100.0, top_p=1e-6, top_k=2**31 - 1, rule=Rule.RATIO),
        replace(GOOD, resume=Resume(rule=Rule.RATIO)),
        replace(asked(rule=Rule.RATIO), resume=Resume(rule=Rule.RATIO)),
        neutral,
        furthest,
        only_ends,
        asked(allowed_token_ids=(1,)),
        replace(asked(n=3, logprobs=0), resume=Resume(token_ids=(1,), more=((), (2, 3)))),
        replace(GOOD, resume=Resume(attempt=2**30)),
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
        asked(bad_words=(huge,) * 64, logit_bias=dict.fromkeys(range(-(2**31), 1024 - 2**31), math.nan)),
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
    def room(
        prompt: int, max_tokens: int | None, resumed: int = 0, more: int = 0, min_tokens: int | None = None
    ) -> tuple[int, list[str]]:
        resume = Resume(token_ids=(1,) * resumed, more=((1,) * more,)) if resumed or more else None
        ask = replace(asked(max_tokens=max_tokens, min_tokens=min_tokens, n=2), resume=resume)
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
    assert "resume.more[0].token_ids: 5 tokens; at most 4" in room(16, 4, more=5)[1][0]
    assert room(20, None, min_tokens=12) == (12, [])
    assert "sampling.min_tokens: 13; at most 12, which is max_tokens" in room(20, None, min_tokens=13)[1][0]
