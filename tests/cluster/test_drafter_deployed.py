"""A drafter with weights in whole clusters: `kadence up` with plain processes, and LLM; text stays plain decoding's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy import defaults
from kadence import CheckpointError, Client, ConfigError
from kadence.cluster import LLM
from services.model import fetch, shipped
from services.verifier.target import Target
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


def up(
    kadence: Run, model: TinyLlama, checkpoint: str, *more: str, transport: str = "grpc"
) -> subprocess.CompletedProcess[str]:
    options = ("--transport", transport, "--drafter", "dflash2", "--policy", "fixed:3", "--model", str(model.folder))
    sets = (
        f"drafter.options.checkpoint={checkpoint}",
        "model.dtype=float32",
        "scheduler.http_port=-1",
        "verifier.draft_deadline_seconds=5",  # a busy machine must not look like a missing drafter
        *more,
    )
    return kadence("up", *options, *(word for text in sets for word in ("--set", text)))


def test_up(kadence: Run, model: TinyLlama) -> None:
    started = up(kadence, model, "tiny-dflash2")  # a path as the user sees it
    assert started.returncode == 0, started.stderr
    assert "dflash2" in kadence("status").stdout
    with Client(started.stdout.split()[2].rstrip(".")) as client:
        for prompt in PROMPTS:  # the first request too
            result = client.generate(prompt_token_ids=prompt, max_tokens=30, ignore_eos=True)
            model.assert_same(prompt, list(result.token_ids), model.generate(prompt, 30))
            assert result.stats.drafted > 0
        replicas = {replica.kind: replica for replica in client.status().replicas}
    verifier = replicas["verifier"]
    assert (verifier.drafter, verifier.drafter_problem) == (replicas["drafter"].replica_id, "")
    assert verifier.kv_pages_total > 0


class Wrong:
    """Drafters for other models; `says` is what ends the start, with both values."""

    def __init__(self, model: TinyLlama, checkpoint: Path, folder: Path, what: str) -> None:
        self.checkpoint, self.options = checkpoint, {}
        if what == "vocabulary":
            self.checkpoint = write_drafter(folder / "wide", vocab_size=340)
            self.says = "drafter's vocab_size is 340, the model's is 330"
        else:
            other = TinyLlama(folder / "other", num_hidden_layers=TARGET_LAYERS, seed=5)
            self.options = {"path": str(other.folder)}
            theirs, its = (Target(it.folder, "float32").fingerprint for it in (other, model))
            self.says = f"the drafter's target fingerprint is {theirs}, the target's is {its}"


@pytest.fixture(params=["vocabulary", "fingerprint"])
def wrong(request: pytest.FixtureRequest, model: TinyLlama, checkpoint: Path, tmp_path: Path) -> Wrong:
    return Wrong(model, checkpoint, tmp_path, request.param)


@pytest.mark.parametrize("transport", ["grpc", "inproc"])
def test_a_drafter_for_another_model_ends_the_start(
    kadence: Run, model: TinyLlama, wrong: Wrong, transport: str
) -> None:
    other = [f"drafter.model.{key}={value}" for key, value in wrong.options.items()]
    started = up(kadence, model, str(wrong.checkpoint), *other, transport=transport)
    assert started.returncode == 1 and "Traceback" not in started.stderr
    assert [line for line in started.stderr.splitlines() if wrong.says in line and "did not start" in line]


def test_llm_with_a_drafter_for_another_model(model: TinyLlama, wrong: Wrong) -> None:
    drafter = {"kind": "dflash2", "options": {"checkpoint": str(wrong.checkpoint)}, "model": wrong.options}
    with pytest.raises(ConfigError) as error:
        LLM(str(model.folder), drafter, dtype="float32").close()
    assert wrong.says in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_that_is_not_there_is_one_line(kadence: Run, model: TinyLlama) -> None:
    started = up(kadence, model, "nowhere")
    assert started.returncode == 1
    assert started.stderr.splitlines()[-1].startswith("kadence: nowhere: no such folder, and not a shipped drafter")


def test_llm(model: TinyLlama, checkpoint: Path) -> None:
    drafter = {"kind": "dflash2", "options": {"checkpoint": str(checkpoint)}}
    patient = {"kv_tokens": 8192, "draft_deadline_seconds": 5.0}
    with LLM(str(model.folder), drafter, "fixed:3", dtype="float32", verifier=patient) as llm:
        assert llm.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)[0].stats.drafted > 0  # the very first
        for rule in ("match", "ratio"):
            results = llm.generate(PROMPTS, max_tokens=30, ignore_eos=True, rule=rule)
            for prompt, result in zip(PROMPTS, results, strict=True):
                model.assert_same(prompt, list(result.token_ids), model.generate(prompt, 30))
                assert result.stats.drafted > 0
        # Sampled under match the text depends on the seed alone, whatever was drafted.
        sampled = [llm.generate(PROMPTS, max_tokens=30, temperature=1.0, seed=4, max_draft_tokens=k) for k in (0, 7)]
        assert [r.token_ids for r in sampled[0]] == [r.token_ids for r in sampled[1]]


def test_llm_drafts_with_the_shipped_drafter(
    model: TinyLlama, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said of drafting, and the model is called by its name."""
    monkeypatch.setattr(fetch, "cache_dir", lambda: model.folder.parent)
    monkeypatch.setattr(shipped, "ROOT", checkpoint.parent)
    ranking = checkpoint / "draft_vocabulary.json"
    ranking.write_text(json.dumps({"token_ids": list(range(100))}))
    settings = {
        defaults.KIND: "dflash2",
        defaults.CHECKPOINT: checkpoint.name,
        "drafter.options.draft_vocabulary": 90,
        "policy.name": "fixed:5",
    }
    monkeypatch.setitem(defaults.DRAFTING, model.folder.name, settings)
    with LLM(model.folder.name, dtype="float32", verifier={"draft_deadline_seconds": 5.0}) as llm:
        with Client(llm.endpoint) as client:
            assert (client.models()[0].drafter_kind, client.status().policy) == ("dflash2", "fixed:5")
        results = llm.generate(PROMPTS, max_tokens=30, ignore_eos=True)
    for prompt, result in zip(PROMPTS, results, strict=True):
        model.assert_same(prompt, list(result.token_ids), model.generate(prompt, 30))
        assert result.stats.drafted > 0 and len(result.stats.k_hist) == 6


def test_llm_says_what_is_wrong(model: TinyLlama, checkpoint: Path, tmp_path: Path) -> None:
    def start(**options: str) -> None:
        LLM(str(model.folder), {"kind": "dflash2", "options": options}, dtype="float32").close()

    with pytest.raises(CheckpointError, match="nowhere"):
        start(checkpoint=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="checkpoint is required"):
        start()
    with pytest.raises(ConfigError, match=r"unknown key chekpoint; did you mean"):
        start(chekpoint=str(checkpoint))
