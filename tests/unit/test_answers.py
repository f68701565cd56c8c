"""Answers collected from scripted messages, what resumes them, and which failures are followed by another try."""

from __future__ import annotations

from typing import Any

import pytest

from kadence import _convert, _core
from kadence._answer import Answers
from kadence._core import Course, Prepared, Settings, Verdict
from kadence._exchange import Exchange
from kadence.errors import BY_CODE, APIError, ConflictError, InternalError, OverloadedError, UnavailableError
from kadence.types import Chunk, RetryConfig, Stats, TokenLogprobs
from kadence.v1 import inference_pb2, types_pb2
from tests.support.scripted import HELLO, chunk, finished, started

Response = inference_pb2.GenerateResponse


def request(**options: Any) -> inference_pb2.GenerateRequest:
    return _convert.request("p", options)


def feed(*responses: Any, n: int | None = None) -> tuple[Answers, list[Chunk]]:
    answers = Answers(request(n=n))
    answers.reopen()
    return answers, [found for response in responses if (found := answers.feed(response)) is not None]


def test_an_answer_is_typed_and_complete() -> None:
    answers, chunks = feed(*HELLO)
    assert chunks == [Chunk((10, 11), "Hel"), Chunk((12,), ""), Chunk((13,), "lo "), Chunk((), "you")]
    result = answers.result
    assert (result.text, result.token_ids, result.finish_reason) == ("Hello you", (10, 11, 12, 13), "stop")
    assert (result.prompt_token_ids, result.seed, result.rule) == ((1, 2), 7, "match")
    assert (result.request_id, result.model, result.attempt) == ("r-1", "tiny", 0)
    assert (result.index, result.logprobs, result.alternatives) == (0, (), ())
    assert result.stats == Stats(4, 12, 10, 6, 10, (1, 0, 2, 1), 3)
    assert result.stats.acceptance_length == 2.5
    assert Stats().acceptance_length == 0.0
    answers.end()


def test_several_answers() -> None:
    answers, chunks = feed(
        started(seed=2**64 - 1),
        chunk("b", 5, index=1),
        chunk("a", 4),
        finished(text="!", index=1),
        chunk("aa", 6, 7),
        finished(types_pb2.FINISH_REASON_LENGTH),
        n=2,
    )
    assert chunks[0] == Chunk((5,), "b", 1) and chunks[2] == Chunk((), "!", 1)
    first = answers.result
    (second,) = first.alternatives
    assert (first.text, first.token_ids, first.index, first.seed) == ("aaa", (4, 6, 7), 0, 2**64 - 1)
    assert (second.text, second.token_ids, second.index, second.seed) == ("b!", (5,), 1, 0)
    assert (first.finish_reason, second.finish_reason, second.alternatives) == ("length", "stop", ())


def test_logprobs_are_kept() -> None:
    piece = chunk("ab", 3, 4)
    piece.chunk.logprobs.add(logprob=-0.5, top_token_ids=[9, 3], top_logprobs=[-0.25, -0.5])
    piece.chunk.logprobs.add(logprob=-1.0)
    answers, (shown,) = feed(started(), piece, finished())
    wanted = (TokenLogprobs(3, -0.5, ((9, -0.25), (3, -0.5))), TokenLogprobs(4, -1.0))
    assert shown.logprobs == answers.result.logprobs == wanted
    piece.chunk.token_ids.append(5)
    with pytest.raises(InternalError, match="2 log-probabilities for 3 tokens"):
        feed(started(), piece)


@pytest.mark.parametrize(
    ("n", "responses"),
    [
        (1, [chunk("x", 1)]),
        (1, [finished()]),
        (1, [started(), started()]),
        (1, [started(), finished(), chunk("x", 1)]),
        (1, [started(), finished(), finished()]),
        (1, [started(), finished(types_pb2.FINISH_REASON_FAILED)]),
        (1, [started(), chunk("x", 1, index=1)]),
        (2, [started(), finished(index=1), chunk("x", 1, index=1)]),
        (2, [started(), finished(index=2)]),
    ],
)
def test_a_broken_order_is_an_internal_error(n: int, responses: list[Response]) -> None:
    with pytest.raises(InternalError):
        feed(*responses, n=n)


@pytest.mark.parametrize(("n", "ends"), [(1, []), (2, [0]), (3, [2, 0])])
def test_an_answer_without_an_end(n: int, ends: list[int]) -> None:
    answers, _ = feed(started("r-9"), *(finished(index=index) for index in ends), n=n)
    with pytest.raises(RuntimeError):
        _ = answers.result
    with pytest.raises(InternalError) as caught:
        answers.end()
    assert caught.value.request_id == "r-9"


def test_events_of_a_later_version_are_skipped() -> None:
    assert feed(started(), Response())[1] == []


def test_what_resumes_a_stream() -> None:
    """The prompt goes as the ids it became, since a chat template may render another date next time."""
    sent = _convert.request(None, {"messages": [{"role": "user", "content": "x"}], "n": 3, "top_p": 0.5})
    answers = Answers(sent)
    assert answers.reopen() is sent
    for response in (started(seed=9, prompt=(4, 5)), chunk("ab", 1, 2), chunk("", 3, index=2), finished(index=2)):
        answers.feed(response)
    again = answers.reopen()
    assert list(again.prompt_token_ids) == [4, 5] and not again.messages and not again.HasField("prompt")
    assert (again.request_id, again.model, again.sampling) == ("r-1", "tiny", sent.sampling)
    resume = again.resume
    assert (list(resume.token_ids), resume.seed, resume.attempt, resume.rule) == ([1, 2], 9, 0, types_pb2.RULE_MATCH)
    assert [list(more.token_ids) for more in resume.more] == [[], [3]]


def test_an_answer_that_had_ended_ends_once() -> None:
    answers, _ = feed(started(), chunk("x", 1, index=1), finished(text="y", index=1), n=2)
    answers.reopen()
    again = started()
    again.started.attempt = 1
    late = [again, finished(types_pb2.FINISH_REASON_LENGTH, text="y", index=1), chunk("a", 2), finished()]
    assert [found for response in late if (found := answers.feed(response))] == [Chunk((2,), "a")]
    result = answers.result
    assert (result.attempt, result.text) == (1, "a")
    assert (result.alternatives[0].text, result.alternatives[0].finish_reason) == ("xy", "stop")


@pytest.mark.parametrize("wrong", [started(seed=8), started(prompt=(1, 3))])
def test_another_request_is_no_resumption(wrong: Response) -> None:
    answers, _ = feed(started(), chunk("x", 1))
    answers.reopen()
    with pytest.raises(InternalError, match="another"):
        answers.feed(wrong)


# Status, whether the server advises a delay: what follows before the answer began, after it, and when re-opening.
F, T, S = Verdict.FINAL, Verdict.RETRY, Verdict.RESUME
VERDICTS: dict[str, tuple[Verdict, Verdict, Verdict]] = {
    "UNAVAILABLE": (T, S, S),
    "RESOURCE_EXHAUSTED": (F, F, F),
    "RESOURCE_EXHAUSTED with advice": (T, S, S),
    "ALREADY_EXISTS": (F, F, S),
    "ABORTED": (F, F, F),
    "CANCELLED": (F, F, F),
    "DEADLINE_EXCEEDED": (F, F, F),
    "DATA_LOSS": (F, F, F),
    "FAILED_PRECONDITION": (F, F, F),
    "INTERNAL": (F, F, F),
    "INVALID_ARGUMENT": (F, F, F),
    "NOT_FOUND": (F, F, F),
    "OUT_OF_RANGE": (F, F, F),
    "PERMISSION_DENIED": (F, F, F),
    "UNAUTHENTICATED": (F, F, F),
    "UNIMPLEMENTED": (F, F, F),
    "UNKNOWN": (F, F, F),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_which_failures_are_final(case: str) -> None:
    code = case.split()[0]
    kind = BY_CODE[code]
    error: APIError = kind("x")
    if isinstance(error, OverloadedError):
        error = OverloadedError("x", retry_after=2.0 if "advice" in case else 0.0)
    error.code = code
    states = ((False, False), (True, False), (True, True))
    assert tuple(_core.verdict(error, begun, reopening) for begun, reopening in states) == VERDICTS[case]


def test_the_table_knows_every_status() -> None:
    assert {case.split()[0] for case in VERDICTS} == BY_CODE.keys()


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        ("INTERNAL", "Received RST_STREAM with error code 2", UnavailableError),
        ("UNKNOWN", "Stream removed", UnavailableError),
        ("INTERNAL", "Exception deserializing response!", InternalError),
        ("CANCELLED", "Received RST_STREAM with error code 8", BY_CODE["CANCELLED"]),
    ],
)
def test_a_connection_that_broke_is_unavailable(code: str, message: str, kind: type[APIError]) -> None:
    assert type(_core.error_of(code, message, None)) is kind
    said = ((_core._status.DETAILS_KEY, b""),)  # the server's own words are taken as they are
    assert type(_core.error_of(code, message, said)) is BY_CODE[code]


def resumed(course: Course, error: APIError, now: float) -> float | None:
    return course.delay_after(error, Verdict.RESUME, now, 0.5)


def test_a_broken_stream_is_tried_again_for_a_time() -> None:
    retry = RetryConfig(attempts=1, initial_delay=1.0, multiplier=2.0, max_delay=5.0, jitter=0.0, resume_seconds=30.0)
    course, gone = Course(1000.0, retry, now=0.0), UnavailableError("x")
    assert [resumed(course, gone, now) for now in (100.0, 101.0, 103.0, 107.0)] == [1.0, 2.0, 4.0, 5.0]
    assert resumed(course, gone, 124.9) == 5.0 and resumed(course, gone, 125.0) is None
    course.progress()  # the next break is a new one
    assert resumed(course, gone, 500.0) == 1.0
    assert resumed(course, OverloadedError("full", retry_after=20.0), 501.0) == 20.0  # beyond max_delay: as advised
    assert resumed(course, OverloadedError("full", retry_after=20.0), 521.0) is None
    course.progress()
    assert resumed(course, gone, 999.5) is None  # the request's own time bounds everything
    assert resumed(Course(1000.0, RetryConfig(resume_seconds=0), now=0.0), gone, 0.0) is None
    assert RetryConfig().resume_seconds == 30.0


def test_endless_tries_do_not_overflow() -> None:
    course = Course(1e9, RetryConfig(initial_delay=1.0, multiplier=10.0, jitter=0.0, resume_seconds=1e9), now=0.0)
    assert [resumed(course, UnavailableError("x"), 0.0) for _ in range(1000)][-1] == 5.0


def test_a_stream_whose_break_was_not_noticed_is_outranked() -> None:
    exchange = Exchange(Settings(), Prepared(request(), 100.0, ()), now=0.0)
    assert exchange.open(0.0).timeout == 100.0
    exchange.feed(started())
    exchange.feed(chunk("x", 1))
    attempts = []
    for error in (UnavailableError("x"), ConflictError("in use"), UnavailableError("x")):
        assert exchange.delay_after(error, 0.0, 0.5) is not None
        assert error.request_id == "r-1"
        attempts.append(exchange.open(0.0).request.resume.attempt)
    assert attempts == [0, 1, 1] and exchange.resumes == 0
    again = started()
    again.started.attempt = 2
    exchange.feed(again)
    assert exchange.resumes == 1
    assert exchange.delay_after(ConflictError("x"), 0.0, 0.5) is None
    assert exchange.open(0.0).request.resume.attempt == 2
