"""The scheduler is killed in mid-stream and started again: the SDK brings the same tokens as if nothing had been."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kadence import Client, GenerateResult, RetryConfig
from tests.support.tiny_llama import TinyLlama

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [2, 3, 5, 7, 11, 2, 3, 5, 7]
TOKENS = 600
PATIENT = RetryConfig(resume_seconds=120.0)


class Processes:
    """A cluster of three processes, one of which can be killed."""

    def __init__(self, folder: Path) -> None:
        self._model = (f"model.path={folder}", "model.name=tiny", "model.dtype=float32")
        self._running: list[subprocess.Popen[str]] = []
        self._port = 0
        self.start_scheduler()
        self.endpoint = self._ready(self.scheduler)
        self._port = int(self.endpoint.rpartition(":")[2])
        at = f"scheduler={self.endpoint}"
        replicas = [self._start("drafter", f"drafter.{at}"), self._start("verifier", f"verifier.{at}", *self._model)]
        for process in replicas:
            self._ready(process)

    def start_scheduler(self) -> None:
        port = f"scheduler.port={self._port}"
        self.scheduler = self._start(
            "scheduler", port, "scheduler.drain_seconds=0.1", "policy.name=fixed:7", *self._model
        )

    def end_scheduler(self, how: signal.Signals) -> None:
        self.scheduler.send_signal(how)
        self.scheduler.wait(20)

    def close(self) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.communicate(timeout=10)

    def _start(self, service: str, *settings: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"services.{service}"]
        for setting in settings:
            command += ["--set", setting]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._running.append(process)
        return process

    def _ready(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("READY "), line
        return line.split()[2]


@pytest.fixture(scope="module")
def cluster(tiny_llama: TinyLlama) -> Iterator[Processes]:
    found = Processes(tiny_llama.folder)
    try:
        yield found
    finally:
        found.close()


def interrupted(cluster: Processes, how: signal.Signals = signal.SIGKILL, **options: Any) -> tuple[GenerateResult, str]:
    """The result of a stream whose scheduler is ended after some tokens, and the text that was shown of answer 0."""
    shown, received, ended = [], 0, False
    with Client(cluster.endpoint, retry=PATIENT) as client, client.stream(**options) as stream:
        for chunk in stream:
            shown += [chunk.text] if chunk.index == 0 else []
            received += len(chunk.token_ids)
            if not ended and received >= 20:
                ended = True
                cluster.end_scheduler(how)
                cluster.start_scheduler()
        assert stream.resumes >= 1, "the answer was complete before anything could interrupt it"
        return stream.result, "".join(shown)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [0, 7])
def test_the_tokens_are_as_if_nothing_had_been(
    cluster: Processes, tiny_llama: TinyLlama, sampling: dict[str, Any], k: int
) -> None:
    options = {"prompt_token_ids": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "max_draft_tokens": k, **sampling}
    cut, shown = interrupted(cluster, **options)
    with Client(cluster.endpoint) as client:
        uncut = client.generate(**options)
    assert cut.token_ids == uncut.token_ids and len(cut.token_ids) == TOKENS
    assert cut.text == shown == uncut.text and cut.finish_reason == "length"
    assert cut.attempt >= 1 and uncut.attempt == 0
    if not sampling:
        tiny_llama.assert_same(PROMPT, list(cut.token_ids[:200]), tiny_llama.generate(PROMPT, 200))


def test_several_answers_with_logprobs_and_penalties(cluster: Processes) -> None:
    options = {"prompt_token_ids": PROMPT, "max_tokens": 200, "ignore_eos": True, "n": 3, "logprobs": 2, "seed": 5}
    options |= {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    cut, _ = interrupted(cluster, **options)
    with Client(cluster.endpoint) as client:
        uncut = client.generate(**options)
    assert len(cut.alternatives) == 2
    for one, other in zip((cut, *cut.alternatives), (uncut, *uncut.alternatives), strict=True):
        assert (one.token_ids, one.text, one.seed) == (other.token_ids, other.text, other.seed)
        assert len(one.logprobs) == 200
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("n", [1, 2])
def test_rule_ratio_goes_on(cluster: Processes, n: int) -> None:
    """With new noise: the tokens are others than uncut, but the rule, the seed and the length are kept."""
    options = {"prompt_token_ids": PROMPT, "max_tokens": 300, "ignore_eos": True, "n": n, "logprobs": 1}
    cut, shown = interrupted(cluster, **options, temperature=1.0, top_p=0.9, seed=11, rule="ratio")
    assert (cut.rule, cut.seed, cut.finish_reason, len(cut.alternatives)) == ("ratio", 11, "length", n - 1)
    assert cut.attempt >= 1 and shown == cut.text
    for one in (cut, *cut.alternatives):
        assert len(one.token_ids) == len(one.logprobs) == 300


def test_a_scheduler_that_drains(cluster: Processes) -> None:
    options = {"prompt_token_ids": PROMPT, "max_tokens": 1000, "ignore_eos": True, "max_draft_tokens": 0}
    cut, _ = interrupted(cluster, signal.SIGTERM, **options)
    with Client(cluster.endpoint) as client:
        assert cut.token_ids == client.generate(**options).token_ids
