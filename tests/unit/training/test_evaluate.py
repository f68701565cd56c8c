"""python -m training.evaluate on a tiny model: what its file holds, its tables, and its errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama
from training.evaluate import laws, main


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its drafter, and prompts of two tasks."""
    folder = tmp_path_factory.mktemp("evaluate")
    TinyLlama(folder / "model", num_hidden_layers=TARGET_LAYERS)
    write_drafter(folder / "drafter")
    (folder / "drafter" / "draft_vocabulary.json").write_text(json.dumps({"token_ids": list(range(330))}))
    lines = [{"task": task, "prompt": text} for text in ("hello", "left out") for task in ("a", "b")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run(scene: Path, *more: str) -> int:
    given = {"--drafter": "drafter", "--model": "model", "--prompts": "prompts.jsonl", "--out": "results/found.json"}
    words = [word for key, name in given.items() for word in (key, str(scene / name))]
    return main([*words, "--vocabulary", "320", "--temperatures", "0", "--count", "1", "--threads", "1", *more])


def test_everything_is_measured_and_told(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(scene) == 0
    found = json.loads((scene / "results" / "found.json").read_text())
    assert (found["draft_tokens"], found["draft_vocabulary"]) == (7, 320)
    served = {(row["drafter"], row["task"]): row for row in found["served"]}
    assert set(served) == {(name, task) for name in ("dflash2", "without selector", "ngram") for task in "ab"}
    for row in served.values():
        assert row["requests"] == 1 and row["temperature"] == 0 and row["rule"] == "match"
        assert row["acceptance_length"] == round(row["tokens"] / row["steps"], 4) >= 1
    for task, part in found["offline"].items():
        # The same answers, drafted for again: as many tokens, and about as many steps, as were served.
        assert part["length"]["walk"] == pytest.approx(served["dflash2", task]["acceptance_length"], rel=0.05)
        assert part["anchors"] == served["dflash2", task]["tokens"]
        assert all(len(columns) == 7 for columns in part["recall"].values()) and len(part["own"]) == 2
    told = capsys.readouterr().out
    assert f"| ngram | 0 | match | {served['ngram', 'a']['acceptance_length']:.2f} (" in told
    assert f"| oracle | b | {found['offline']['b']['length']['oracle']:.2f} |" in told


def test_laws() -> None:
    assert list(laws([0.0, 0.7])) == [(0.0, "match"), (0.7, "match"), (0.7, "ratio")]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--temperatures", "1"], "--temperatures are [1.0]; 0 is needed"),
        (["--count", "0"], "--count is 0; at least 1"),
        (["--vocabulary", "331"], "331 token ids are wanted"),
        (["--drafter", "/nowhere"], "/nowhere"),
        (["--prompts", "/nowhere"], "/nowhere"),
    ],
)
def test_errors_are_one_line(scene: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], says: str) -> None:
    assert run(scene, *wrong) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1, error
