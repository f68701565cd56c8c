"""Who runs, who waits, who is refused, and where a request goes."""

from __future__ import annotations

import pytest

from kadence.errors import ConfigError
from services.scheduler import admission, policy, routing
from services.scheduler.admission import Verdict
from services.scheduler.policy import Epoch
from services.scheduler.routing import Candidate


@pytest.mark.parametrize(
    ("queued", "free", "verdict"),
    [(0, 1, Verdict.RUN), (0, 0, Verdict.WAIT), (1, 5, Verdict.WAIT), (3, 0, Verdict.WAIT), (4, 0, Verdict.REFUSE)],
)
def test_admit(queued: int, free: int, verdict: Verdict) -> None:
    assert admission.admit(queued=queued, max_queue=4, free=free) is verdict


@pytest.mark.parametrize(
    ("queued", "free", "count", "verdict"),
    [
        (0, 3, 3, Verdict.RUN),
        (0, 3, 4, Verdict.WAIT),  # three run, one waits
        (0, 3, 7, Verdict.WAIT),
        (0, 3, 8, Verdict.REFUSE),
        (0, 0, 5, Verdict.REFUSE),
        (2, 3, 2, Verdict.WAIT),  # behind those that wait
        (2, 3, 3, Verdict.REFUSE),
    ],
)
def test_answers_of_one_request_are_admitted_together(queued: int, free: int, count: int, verdict: Verdict) -> None:
    assert admission.admit(queued=queued, max_queue=4, free=free, count=count) is verdict


def test_without_a_queue_a_free_place_is_still_taken() -> None:
    assert admission.admit(queued=0, max_queue=0, free=1) is Verdict.RUN
    assert admission.admit(queued=0, max_queue=0, free=0) is Verdict.REFUSE


def test_places() -> None:
    assert admission.places(in_flight=3, max_in_flight=10, free_of_verifiers=4) == 4
    assert admission.places(in_flight=8, max_in_flight=10, free_of_verifiers=4) == 2
    assert admission.places(in_flight=12, max_in_flight=10, free_of_verifiers=4) == 0
    assert admission.verifier_capacity(64) == 72 and admission.verifier_capacity(1) == 2
    assert admission.verifier_capacity(0) > 10_000


def test_retry_after_grows_with_the_queue_within_bounds() -> None:
    def advice(queued: int, seconds: float = 2.0) -> float:
        return admission.retry_after(queued=queued, running=8, seconds_per_request=seconds)

    assert advice(16) == 2.0 < advice(32) == 4.0
    assert advice(0) == admission.MIN_RETRY_SECONDS
    assert advice(10_000) == admission.MAX_RETRY_SECONDS
    assert admission.retry_after(queued=5, running=0, seconds_per_request=1.0) == 2.5


def verifier(name: str, outstanding: int, in_flight: int = 1, capacity: int = 8, reported: int = 0) -> Candidate:
    return Candidate(name, outstanding, in_flight, capacity, reported)


def test_least_outstanding_tokens_wins_over_fewest_requests() -> None:
    assert routing.choose([verifier("a", 500, in_flight=1), verifier("b", 300, in_flight=6)]) == "b"


def test_ties_go_to_the_reported_load_then_to_fewer_requests() -> None:
    assert routing.choose([verifier("a", 0, reported=9), verifier("b", 0, reported=3)]) == "b"
    assert routing.choose([verifier("a", 0, in_flight=2), verifier("b", 0, in_flight=1)]) == "b"


def test_full_and_failed_verifiers() -> None:
    assert routing.choose([verifier("a", 0, in_flight=8), verifier("b", 900)]) == "b"
    assert routing.choose([verifier("a", 0, capacity=0)]) is None
    assert routing.choose([]) is None
    assert routing.choose([verifier("a", 0), verifier("b", 900)], avoid="a") == "b"
    assert routing.choose([verifier("a", 0)], avoid="a") == "a"


def test_work_shrinks_as_tokens_come() -> None:
    assert routing.work(100, 0, 50, prefilled=False) == 150
    assert routing.work(100, 1, 50, prefilled=True) == 49
    assert routing.work(100, 50, 50, prefilled=True) == 0
    assert routing.work(100, 20, 50, prefilled=False) == 150  # replayed: 120 to prefill, 30 to produce


def test_policies_by_name() -> None:
    assert policy.parse("off").max_draft_tokens == 0
    assert policy.parse("fixed:7").max_draft_tokens == 7
    assert policy.parse("fixed:0").max_draft_tokens == 0


@pytest.mark.parametrize(
    "name", ["", "fixed", "fixed:", "fixed:-1", "fixed:7.5", "fixed:x", "adaptive", "OFF", "fixed:65"]
)
def test_unknown_policies(name: str) -> None:
    with pytest.raises(ConfigError, match=r"off or fixed:K|at most 64"):
        policy.parse(name)


def test_epochs() -> None:
    assert Epoch(2, 1) > Epoch(1, 9) > Epoch(1, 8)
    assert policy.succeed(Epoch(5, 3), Epoch(0, 0)) == Epoch(5, 3)
    assert policy.succeed(Epoch(5, 3), Epoch(5, 3)) == Epoch(5, 3)
    assert policy.succeed(Epoch(5, 3), Epoch(4, 99)) == Epoch(5, 3)
    assert policy.succeed(Epoch(5, 3), Epoch(5, 8)) == Epoch(5, 9)
    assert policy.succeed(Epoch(5, 3), Epoch(7, 2)) == Epoch(7, 3)
