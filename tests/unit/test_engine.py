"""The engine's promises to its callers: one end per request, whatever happens, and then every page is free."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from services.verifier.allocation import Policy
from services.verifier.outcomes import Pace, StepReport
from services.verifier.request import FinishReason, Request, Terminal
from services.verifier.target import Target
from tests.support.engine_harness import Answer, Harness, request
from tests.support.tiny_llama import TinyLlama

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Target:
    return Target(tiny_llama.folder, "float32")


class Acting(Harness):
    """Calls `act` once, in the engine's thread, when `name` has produced `at` tokens."""

    def __init__(self, target: Target, name: str, at: int, act: Callable[[], None], **options: object) -> None:
        def on_step(report: StepReport) -> None:
            if not self.acted and len(self.answers.get(name, Answer()).tokens) >= at:
                self.acted = True
                act()

        self.acted = False
        super().__init__(target, on_step=on_step, **options)  # type: ignore[arg-type]

    def run(self, requests: list[Request]) -> dict[str, Answer]:  # type: ignore[override]
        answers = super().run(requests)
        assert self.acted
        return answers


def end(answer: Answer) -> Terminal:
    assert answer.terminal is not None
    return answer.terminal


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_stop_ends_running_and_waiting_requests(target: Target, max_num_seqs: int) -> None:
    def stop() -> None:
        for name in ("a", "b", "nobody"):
            harness.engine.stop(name, 0)

    harness = Acting(target, "a", 5, stop, max_num_seqs=max_num_seqs)
    answers = harness.run([request(name, PROMPT, 60) for name in "abc"])
    assert end(answers["a"]).reason == end(answers["b"]).reason == FinishReason.CANCELLED
    assert len(answers["a"].tokens) == 5  # within one step
    assert end(answers["c"]).reason == FinishReason.LENGTH and len(answers["c"].tokens) == 60


def test_stop_of_another_attempt_is_ignored(target: Target) -> None:
    harness = Acting(target, "a", 2, lambda: harness.engine.stop("a", 0))
    assert end(harness.run([request("a", PROMPT, 9, attempt=1)])["a"]).reason == FinishReason.LENGTH


@pytest.mark.parametrize("attempt", [0, 1])
def test_duplicates_and_older_attempts_change_nothing(target: Target, attempt: int) -> None:
    harness = Acting(target, "a", 3, lambda: harness.engine.submit(request("a", [9], 50, attempt=attempt)))
    answer = harness.run([request("a", PROMPT, 20, attempt=1)])["a"]
    assert len(answer.tokens) == 20 and {update.attempt for update in answer.updates} == {1}


def test_newer_attempt_replaces(target: Target) -> None:
    """The old attempt falls silent; the new one goes on after what it was given."""
    plain = Harness(target).run([request("a", PROMPT, 20)])["a"].tokens
    newer = request("a", PROMPT, 20, committed=plain[:3], attempt=1, owner="other")
    harness = Acting(target, "a", 6, lambda: harness.engine.submit(newer))
    harness._left = {"a"}
    harness.engine.submit(request("a", PROMPT, 20))
    harness.engine.start()
    assert harness._done.wait(30)
    harness.engine.close()
    updates = harness.answers["a"].updates
    by_attempt = {attempt: [u for u in updates if u.attempt == attempt] for attempt in (0, 1)}
    assert [u.terminal for u in by_attempt[0]] == [None] * len(by_attempt[0])
    assert {u.owner for u in by_attempt[1]} == {"other"}
    assert [t for u in by_attempt[1] for t in u.tokens] == plain[3:]
    assert harness.engine.load().pages_used == 0


def test_waiting_requests_are_bounded(target: Target) -> None:
    answers = Harness(target, max_num_seqs=1, max_waiting=3).run([request(str(i), PROMPT, 5) for i in range(8)])
    ends = [end(answers[str(i)]) for i in range(8)]
    # All come before the first step, so nobody has been admitted yet.
    assert [e.reason for e in ends] == [FinishReason.LENGTH] * 3 + [FinishReason.FAILED] * 5
    assert (ends[3].code, ends[3].message) == ("RESOURCE_EXHAUSTED", "too many requests wait at the verifier")


def test_a_newer_attempt_finds_room_in_a_full_queue(target: Target) -> None:
    """The request was let in once; who resumes it while as many wait as may is not turned away."""
    plain = Harness(target).run([request("a", PROMPT, 20)])["a"].tokens
    newer = request("a", PROMPT, 20, committed=plain[:3], attempt=1)

    def crowd() -> None:
        for it in (request("b", PROMPT, 5), request("c", PROMPT, 5), newer):
            harness.engine.submit(it)

    harness = Acting(target, "a", 6, crowd, max_num_seqs=1, max_waiting=2)
    harness._left = {"a", "b", "c"}
    harness.engine.submit(request("a", PROMPT, 20))
    harness.engine.start()
    assert harness._done.wait(30)
    harness.engine.close()
    assert [t for u in harness.answers["a"].updates if u.attempt == 1 for t in u.tokens] == plain[3:]


def test_a_failed_step_fails_its_requests_and_no_others(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of the target is no end of the engine: what comes next is served."""
    forward, calls = target.forward_tapped, []

    def fail_fourth(*args: object) -> object:
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("out of luck")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward_tapped", fail_fourth)
    harness = Acting(target, "a", 3, lambda: None, max_num_seqs=2)
    answers = harness.run([request(name, PROMPT, 9) for name in "abc"])
    for name in "abc":
        assert (end(answers[name]).reason, end(answers[name]).code) == (FinishReason.FAILED, "INTERNAL")
        assert "out of luck" not in end(answers[name]).message
    assert [len(answers[name].tokens) for name in "abc"] == [3, 3, 0]


def test_serves_on_after_a_failed_step(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = target.forward_tapped
    wanted = Harness(target).run([request("b", PROMPT, 9)])["b"].tokens
    monkeypatch.setattr(target, "forward_tapped", lambda *_: 1 / 0)
    harness = Harness(target)

    def mend(report: StepReport) -> None:
        if report.updates[0].terminal and report.updates[0].request_id == "a":
            monkeypatch.setattr(target, "forward_tapped", forward)
            harness.engine.submit(request("b", PROMPT, 9))

    harness._on_step = mend
    harness._left = {"a", "b"}
    harness.engine.submit(request("a", PROMPT, 9))
    harness.engine.start()
    assert harness._done.wait(10)
    harness.engine.close()
    answers = harness.answers
    assert end(answers["a"]).code == "INTERNAL" and answers["b"].tokens == wanted


def test_policies_by_epoch(target: Target) -> None:
    engine = Harness(target, k=2).engine
    for epoch, k, taken in (((1, 1), 9, 2), ((0, 99), 9, 2), ((1, 2), 3, 3), ((2, 0), 4, 4), ((1, 50), 9, 4)):
        engine.set_policy(Policy("fixed", k, epoch))
        assert engine.policy.max_draft_tokens == taken


def test_sleeps_when_idle_and_wakes(target: Target) -> None:
    """No steps without work; a request that comes later is served at once."""
    harness = Harness(target)
    harness._left = {"a"}
    harness.engine.start()
    time.sleep(0.05)
    assert harness.engine.load().stats.steps == 0 and not harness.engine.busy
    harness.engine.submit(request("a", PROMPT, 5))
    assert harness._done.wait(10)
    steps = harness.engine.load().stats.steps
    time.sleep(0.05)
    assert harness.engine.load().stats.steps == steps and not harness.engine.busy
    harness.engine.close()
    harness.engine.close()
    assert not harness.engine.broken


def test_a_lost_page_breaks_the_engine(target: Target) -> None:
    """Found when idle, and a dead end on purpose: what is still running here must not be trusted."""
    harness = Harness(target)
    harness._left = {"a"}
    harness.engine._pool._free.pop()
    harness.engine.submit(request("a", PROMPT, 5))
    harness.engine.start()
    harness.engine._thread.join(10)
    assert harness.engine.broken and len(harness.answers["a"].tokens) == 5


def test_a_broken_engine_fails_what_it_holds(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(target)
    harness._left = {"a", "b"}
    monkeypatch.setattr(harness.engine, "step", lambda updates: exec("raise KeyboardInterrupt"))
    for name in "ab":
        harness.engine.submit(request(name, PROMPT, 5))
    harness.engine.start()
    assert harness._done.wait(10)
    harness.engine._thread.join(10)
    assert harness.engine.broken and {end(harness.answers[name]).code for name in "ab"} == {"INTERNAL"}


def test_totals_and_load(target: Target) -> None:
    loads = []
    harness = Harness(target, on_step=lambda report: loads.append(report.load))
    harness.run([request("a", PROMPT, 5), request("b", [1] * 6, 3)])
    stats = harness.engine.load().stats
    assert (stats.prompt_tokens, stats.generated, stats.request_steps, stats.committed) == (10, 8, 6, 6)
    assert [load.running for load in loads] == [2, 2, 1, 1, 0]
    assert [load.outstanding_tokens for load in loads] == [4 + 1 + 2 + 1, 3 + 1 + 1 + 1, 2 + 1, 1 + 1, 0]
    assert all(load.stats is not loads[-1].stats for load in loads[:-1]) and loads[-1].step_seconds > 0


def test_patience_grows_with_what_drafts_gain() -> None:
    pace = Pace()
    assert pace.patience(0.05) == 0.05 and pace.step_seconds == 0
    for seconds in (0.1, 0.2, 9.0):
        pace.add_step(seconds)
    assert pace.step_seconds == 0.2 and pace.patience(0.05) == pytest.approx(0.2)
    for _ in range(100):
        pace.add_gain(4.0)
    assert pace.patience(0.05) == pytest.approx(0.8, rel=1e-3)
    for _ in range(200):
        pace.add_gain(0.0)
    assert pace.patience(0.05) == 0.05


def test_same_attempt_of_another_scheduler_is_told_so(target: Target) -> None:
    """The one that runs goes on; the other stream hears an end of its own."""
    twin = request("a", PROMPT, 20, owner="other")
    harness = Acting(target, "a", 3, lambda: harness.engine.submit(twin))
    refused: list[Terminal] = []

    def split(report: StepReport) -> None:
        for update in [u for u in report.updates if u.owner == "other"]:
            report.updates.remove(update)
            assert update.terminal is not None and not update.tokens
            refused.append(update.terminal)
        step(report)

    step, harness.engine._on_step = harness.engine._on_step, split
    assert len(harness.run([request("a", PROMPT, 20)])["a"].tokens) == 20
    assert [(terminal.reason, terminal.code) for terminal in refused] == [(FinishReason.FAILED, "ALREADY_EXISTS")]


def test_broken_engine_still_ends_every_request(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost page is found when idle: the replica is unhealthy, and who comes later is told instead of left waiting."""
    harness = Harness(target)
    engine = harness.engine
    engine.start()
    monkeypatch.setattr(engine._pool, "_free", engine._pool._free[1:])  # a page is lost
    for name in "ab":
        harness._left = {name}
        harness._done.clear()
        engine.submit(request(name, PROMPT, 5))
        assert harness._done.wait(20)
    for _ in range(200):
        if engine.broken:
            break
        time.sleep(0.05)
    assert engine.broken
    harness._left = {"c"}
    harness._done.clear()
    engine.submit(request("c", PROMPT, 5))
    assert harness._done.wait(20)
    assert (end(harness.answers["c"]).reason, end(harness.answers["c"]).code) == (FinishReason.FAILED, "INTERNAL")
    engine.close()
