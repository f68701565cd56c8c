"""The exception tree survives the trip through google.rpc.Status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kadence import errors
from kadence._status import decode, encode


def round_trip(error: errors.APIError) -> errors.APIError:
    return decode(*encode(error))


def test_every_grpc_status_is_mapped() -> None:
    assert set(errors.BY_CODE) == {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.mark.parametrize("code", errors.BY_CODE)
def test_class_and_code_survive(code: str) -> None:
    error = decode(code, "what went wrong", None)
    assert type(error) is errors.BY_CODE[code]
    again = round_trip(error)
    assert (type(again), again.code, again.message, str(again)) == (
        type(error),
        code,
        "what went wrong",
        "what went wrong",
    )


def test_details_survive() -> None:
    bad = errors.InvalidRequestError.of("sampling.top_p", "1.5 is outside (0, 1]")
    bad.request_id = "r-1"
    again = round_trip(bad)
    assert isinstance(again, errors.InvalidRequestError)
    assert again.violations == (errors.FieldViolation("sampling.top_p", "1.5 is outside (0, 1]"),)
    assert again.request_id == "r-1"
    busy = round_trip(errors.OverloadedError("queue full", retry_after=2.25))
    assert isinstance(busy, errors.OverloadedError) and busy.retry_after == 2.25


def test_overloaded_without_advice_has_none() -> None:
    error = decode("RESOURCE_EXHAUSTED", "message larger than max", None)
    assert isinstance(error, errors.OverloadedError) and error.retry_after == 0.0


def test_unreadable_details_are_ignored() -> None:
    assert decode("NOT_FOUND", "no model x", b"\xff\xff\xff").message == "no model x"
    status = status_pb2.Status()
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
    status.details.add(type_url="type.googleapis.com/unheard.Of", value=b"1")
    status.details.add().Pack(error_details_pb2.RequestInfo(request_id="r-2"))
    error = decode("RESOURCE_EXHAUSTED", "busy", status.SerializeToString())
    assert isinstance(error, errors.OverloadedError)
    assert (error.retry_after, error.request_id) == (0.0, "r-2")


def test_unknown_code_is_internal() -> None:
    error = decode("BRAND_NEW", "?", None)
    assert type(error) is errors.InternalError and error.code == "INTERNAL"


def test_long_texts_fit_a_header() -> None:
    violations = tuple(errors.FieldViolation(f"stop[{i}]", "ü" * 100_000) for i in range(1000))
    error = errors.InvalidRequestError("é" * 10_000_000, violations=violations, request_id="x" * 5000)
    code, message, details = encode(error)
    assert code == "INVALID_ARGUMENT"
    assert len(message.encode()) * 3 + len(details) * 4 / 3 < 8000
    assert message.endswith("...") and "\ufffd" not in message
    assert round_trip(error).message == message


def test_a_lone_surrogate_does_not_break_the_answer() -> None:
    assert encode(errors.NotFoundError("model \ud800"))[1] == "model ?"
