"""The README's commands for training a drafter have the options that it names."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest

from tests.shape.source_tree import ROOT

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Train a drafter\n")[1].split("\n## ")[0]
COMMANDS = [shlex.split(line) for line in re.findall(r"^python -m (training\..*)$", SECTION, re.MULTILINE)]


def test_every_step_is_there() -> None:
    steps = ["data", "vocabulary", "features", "train", "evaluate"]
    assert [command[0] for command in COMMANDS] == [f"training.{step}" for step in steps]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_its_options_are_known(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(command[0]).main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = {word for word in command if word.startswith("--")}
    assert ended.value.code == 0 and named and named <= known
