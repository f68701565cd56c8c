"""A drafter with weights in whole clusters: `kadence up` with plain processes, and LLM; text stays plain decoding's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kadence import CheckpointError, Client, ConfigError
from kadence.cluster import LLM
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama

PROMPTS = [[5, 6, 7], [9, 9, 9, 9], [40, 41, 42, 40, 41, 42, 40]]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("model"), num_hidden_layers=TARGET_LAYERS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafters") / "tiny-dflash2")


@pytest.fixture
def kadence(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a command in the folder that holds the checkpoint; whatever the test did, no cluster stays."""
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KADENCE_ENDPOINT", raising=False)
    monkeypatch.chdir(checkpoint.parent)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "kadence.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    yield run
    run("down")


def up(kadence: Run, model: TinyLlama, checkpoint: str) -> subprocess.CompletedProcess[str]:
    options = ("--transport", "grpc", "--drafter", "dflash2", "--policy", "fixed:3", "--model", str(model.folder))
    sets = (f"drafter.options.checkpoint={checkpoint}", "model.dtype=float32", "scheduler.http_port=-1")
    return kadence("up", *options, *(word for text in sets for word in ("--set", text)))


def test_up(kadence: Run, model: TinyLlama) -> None:
    started = up(kadence, model, "tiny-dflash2")  # a path as the user sees it
    assert started.returncode == 0, started.stderr
    assert "dflash2" in kadence("status").stdout
    drafted, end = 0, time.monotonic() + 60
    with Client(started.stdout.split()[2].rstrip(".")) as client:
        while not drafted and time.monotonic() < end:  # the verifier may still be shaking hands with the drafter
            for prompt in PROMPTS:
                result = client.generate(prompt_token_ids=prompt, max_tokens=30, ignore_eos=True)
                model.assert_same(prompt, list(result.token_ids), model.generate(prompt, 30))
                drafted += result.stats.drafted
    assert drafted


def test_a_checkpoint_that_is_not_there_is_one_line(kadence: Run, model: TinyLlama) -> None:
    started = up(kadence, model, "nowhere")
    assert started.returncode == 1 and "Traceback" not in started.stderr
    assert [line for line in started.stderr.splitlines() if "nowhere" in line and "drafter-0 did not start" in line]


def test_llm(model: TinyLlama, checkpoint: Path) -> None:
    drafter = {"kind": "dflash2", "options": {"checkpoint": str(checkpoint)}}
    with LLM(str(model.folder), drafter, "fixed:3", dtype="float32", verifier={"kv_tokens": 8192}) as llm:
        for rule in ("match", "ratio"):
            results = llm.generate(PROMPTS, max_tokens=30, ignore_eos=True, rule=rule)
            for prompt, result in zip(PROMPTS, results, strict=True):
                model.assert_same(prompt, list(result.token_ids), model.generate(prompt, 30))
                assert result.stats.drafted > 0
        # Sampled under match the text depends on the seed alone, whatever was drafted.
        sampled = [llm.generate(PROMPTS, max_tokens=30, temperature=1.0, seed=4, max_draft_tokens=k) for k in (0, 7)]
        assert [r.token_ids for r in sampled[0]] == [r.token_ids for r in sampled[1]]


def test_llm_says_what_is_wrong(model: TinyLlama, checkpoint: Path, tmp_path: Path) -> None:
    def start(**options: str) -> None:
        LLM(str(model.folder), {"kind": "dflash2", "options": options}, dtype="float32").close()

    with pytest.raises(CheckpointError, match="nowhere"):
        start(checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="checkpoint is required"):
        start()
    with pytest.raises(ConfigError, match=r"unknown key chekpoint; did you mean"):
        start(chekpoint=str(checkpoint))
