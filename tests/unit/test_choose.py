"""The study that chooses a drafter: what counts of an answer, and what it says of a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import choose
from bench.choose import Measured
from bench.load import Answer
from kadence import GenerateResult, Stats


def answer(tokens: int, *steps: tuple[float, int]) -> Answer:
    """Its first token comes at 1 s, and then so many tokens after so many seconds each."""
    arrivals = [(1.0, 1)]
    for seconds, count in steps:
        arrivals.append((arrivals[-1][0] + seconds, count))
    loops = tuple(index % 16 for index in range(tokens)) if tokens > 32 else tuple(range(tokens))
    return Answer(GenerateResult("", loops, "length", Stats(steps=len(steps)), (), 0, "match", "", ""), arrivals)


def test_steps_cost_and_bring() -> None:
    measured = Measured()
    measured.take(answer(10, (0.5, 3), (0.25, 2), (0.25, 4)))
    assert (measured.seconds, measured.lengths, measured.rates) == ([0.25], [3.0], [9.0])


def test_what_loops_does_not_count() -> None:
    measured = Measured()
    measured.take(answer(48, (2.0, 15), (4.0, 16), (9.0, 16)))  # the 16-gram of tokens 16 to 31 is a repeat
    assert (measured.lengths, measured.rates) == ([15.5], [31 / 6.0])


def test_rows_are_held_against_plain_decoding() -> None:
    found = {
        ("plain", 0, "a"): Measured([0.02], [1.0], [50.0]),
        ("mine", 3, "a"): Measured([0.03], [2.0], [60.0]),
        ("mine", 5, "a"): Measured([0.04], [3.0], [75.0]),
        ("plain", 0, "b"): Measured(),
        ("mine", 3, "b"): Measured(),
    }
    rows = [choose._row(*key, found) for key in found if key[0] == "mine"]
    assert rows[0] == {"drafter": "mine", "k": 3, "task": "a", "acceptance_length": 2.0, "step_cost": 1.5, **gain(1.2)}
    assert "gain" not in rows[2]
    best, other = choose.table(rows).split("\n")
    assert best.startswith("1.50x  mine k=5: a step costs 2.00 plain ones; a 1.50x at 3.00")
    assert other.startswith("1.20x  mine k=3: a step costs 1.50 plain ones; a 1.20x at 2.00")


def gain(value: float) -> dict[str, float]:
    return {"gain": value, "gain_low": value, "gain_high": value}


@pytest.mark.parametrize(("text", "told"), [("/nowhere", "/nowhere: no drafter"), ("/nowhere,many", "many")])
def test_wrong_drafters_are_told(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"task": "a", "prompt": "b"}\n')
    monkeypatch.setattr(sys, "argv", ["choose", "--prompts", str(tmp_path), text])
    assert choose.main() == 1
    assert told in capsys.readouterr().err
