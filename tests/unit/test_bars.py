"""The harness of the bars: what holds, what is worst, how spread is told, and that every group can be found."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from pathlib import Path

import pytest

from bench import drafter, options, stats, tasks
from bench.bars import __main__ as command
from bench.bars import groups, report
from bench.bars.bar import Bar, number
from bench.bars.bench import Bench
from bench.tasks import Prompts
from kadence import SamplingOptions
from kadence.errors import ConfigError


@pytest.mark.parametrize(
    ("bar", "passed"),
    [
        (Bar("speed", 1.3, ">=", 1.3), True),
        (Bar("speed", 1.29, ">=", 1.3), False),
        (Bar("memory", 2.0, "<=", 2), True),
        (Bar("memory", 2.01, "<=", 2), False),
        (Bar("told", 5.0), None),
        (Bar("broken", None, ">=", 1), False),
        (Bar("broken", None), False),
        (Bar("broken", math.nan, "<=", 1), False),
        (Bar.count("wrong", 0, 10), True),
        (Bar.count("wrong", 1, 10), False),
        (Bar.count("wrong", 0, 0), False),
    ],
)
def test_what_holds(bar: Bar, passed: bool | None) -> None:
    assert bar.passed is passed


def test_line_names_everything() -> None:
    bar = Bar("one stream", 1.4567, ">=", 1.3, "x", (1.4, 1.51), aim=1.7, note="on this machine")
    assert bar.line("first-light/speed/") == (
        "PASS first-light/speed/one stream: 1.46 x (1.40..1.51) bar >= 1.3, aim 1.7; on this machine"
    )
    assert Bar("pages", 3, "<=", 0).line() == "FAIL pages: 3 bar <= 0"
    assert Bar("added time", 0.25, unit="ms").line() == "INFO added time: 0.250 ms"


def test_worst_is_the_one_with_least_to_spare() -> None:
    bars = [
        ("g/a", Bar("exact", 0, "<=", 0)),
        ("g/a", Bar("told", 9.0)),
        ("g/b", Bar("fast", 1.95, ">=", 1.3, "x")),
        ("g/b", Bar("small", 1.9, "<=", 2, "GiB")),
    ]
    assert report.last_line(bars) == "3 of 3 hold; worst: g/b/small, 1.90 GiB against <= 2"
    # A bar that fails is worse than any that holds, also one whose number is not comparable.
    bars.append(("g/c", Bar("negative", -1.0, ">=", 0)))
    assert report.last_line(bars) == "3 of 4 hold; worst: g/c/negative, -1 against >= 0"
    bars.append(("g/d", Bar("measured", None, note="it broke")))
    assert report.last_line(bars).startswith("3 of 5 hold; worst: ")


def test_numbers_have_three_digits() -> None:
    assert [number(x) for x in (0, 3.0, 1.2345, 36.66, 263.4, 0.01234, 12345.6)] == (
        ["0", "3", "1.23", "36.7", "263", "0.0123", "12346"]
    )


def test_estimates() -> None:
    same = stats.ratio([2.0, 2.0, 2.0], [1.0, 1.0])
    assert (same.value, same.low, same.high) == (2.0, 2.0, 2.0)
    spread = stats.ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0])
    assert spread.low < spread.value == 3.0 < spread.high
    assert stats.quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert stats.quantile_difference([3.0] * 9, [1.0] * 9, 0.95).value == 2.0
    steady = [(float(x), 100.0 + 2.0 * x) for x in range(10)]
    assert stats.slope(steady).value == pytest.approx(2.0)
    assert stats.slope([(x, 900.0 if x == 4 else 5.0) for x in range(10)]).value == 0.0


def test_every_group_is_found_and_fits_its_time() -> None:
    assert "first-light" in groups.groups()
    for group in groups.groups():
        found = groups.capabilities(group)
        assert found
        assert sum(capability.minutes for capability in found) <= command.MINUTES
    (one,) = groups.capabilities("first-light/rows")
    assert one.module == "bench.bars.first_light.rows"
    with pytest.raises(ConfigError, match="first-light"):
        groups.capabilities("second-light")


def test_the_depth_group() -> None:
    found = {capability.name.partition("/")[2]: capability for capability in groups.capabilities("depth")}
    assert set(found) == {"options", "prefix", "pressure", "long-prompt", "openai", "http", "families"}
    assert all(0 < capability.minutes <= 10 for capability in found.values())
    assert sum(capability.minutes for capability in found.values()) <= 25
    for capability in found.values():
        assert inspect.isasyncgenfunction(importlib.import_module(capability.module).measure)


def test_the_dflash2_group() -> None:
    found = {capability.name.partition("/")[2]: capability for capability in groups.capabilities("dflash2")}
    assert set(found) == {"reference", "rebuild", "cost", "wire", "alone", "speed"}
    assert all(0 < capability.minutes <= 10 for capability in found.values())
    for capability in found.values():
        assert inspect.isasyncgenfunction(importlib.import_module(capability.module).measure)


def test_a_drafter_is_found_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "OURS", tmp_path / "ours")
    assert drafter.found(None) is None
    with pytest.raises(ConfigError, match="elsewhere"):
        drafter.found(tmp_path / "elsewhere")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").touch()
    assert drafter.found(None) == drafter.found(tmp_path / "ours") == tmp_path / "ours"
    bench = Bench("g/c", Prompts({}), True, 0.0)
    with pytest.raises(ConfigError, match="--drafter"):
        bench.checkpoint()


def test_draft_vocabulary_is_beside_the_checkpoint_or_ranked(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "drafter"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"data\.jsonl"):
        drafter.draft_vocabulary(folder, tmp_path)
    (folder.parent / "data.jsonl").write_text(
        '{"prompt_ids": [9, 9, 9], "response_ids": [5, 7, 7]}\n{"prompt_ids": [], "response_ids": [7, 5, 3]}\n'
    )
    assert json.loads(drafter.draft_vocabulary(folder, tmp_path).read_text()) == {"token_ids": [7, 5, 3]}
    (folder / "draft_vocabulary.json").touch()
    assert drafter.draft_vocabulary(folder, tmp_path) == folder / "draft_vocabulary.json"


def test_steps_by_their_place_in_the_answer() -> None:
    assert drafter.within([3, 1, 4, 2], 9) == [3, 1, 4] == drafter.within([3, 1, 4, 2], 10)
    assert drafter.within([3, 1, 4, 2], 8) == [3, 1] and drafter.within([3], 3) == []
    assert drafter.by_place([3, 1, 4]) == {1: 3, 4: 1, 5: 4}


def test_options_put_to_the_test_are_all_there_are() -> None:
    ids = list(range(400))
    single, drawn = options.alone(ids), options.combinations(200, ids)
    assert drawn == options.combinations(200, ids) != options.combinations(200, ids, seed=1)
    # What does not decide tokens, or is the measurement's own.
    others = {"seed", "max_tokens", "rule", "max_draft_tokens"}
    known = set(SamplingOptions.__annotations__) - others
    assert {name for _, chosen in single for name in chosen} == known
    assert {name for chosen in drawn for name in chosen} == known
    assert options.is_plain({"temperature": 1.0, "top_p": 0.5}) and not options.is_plain({"min_p": 0.1})


def test_our_prompts_are_enough_and_differ() -> None:
    prompts = Prompts.read(tasks.OURS)
    assert set(prompts.by_task) == {"gsm8k", "humaneval", "mt_bench"}
    assert all(len(set(texts)) == len(texts) >= 16 for texts in prompts.by_task.values())
    taken = prompts.take(48)
    assert len(set(taken)) == 48
    assert prompts.take(50)[48:] == taken[:2]


def test_prompts_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        Prompts.read(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"task": "x", "prompt": "y"}\n{"task": "x"}\n')
    with pytest.raises(ConfigError, match=re.escape("a.jsonl:2")):
        Prompts.read(tmp_path)


def test_command_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A group of two capabilities, one of which fails half-way, in processes of their own."""
    group = tmp_path / "tried_out"
    group.mkdir()
    head = "from bench.bars.bar import Bar\n\nMINUTES = {}\n\n\nasync def measure(bench):\n"
    (group / "__init__.py").write_text("")
    (group / "fine.py").write_text(head.format(1) + '    yield Bar("holds", 1, ">=", 1)\n')
    (group / "broken.py").write_text(
        head.format(2) + '    yield Bar("fails", 0, ">=", 1)\n    raise ValueError("no luck")\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))  # which the measuring process inherits
    found = [groups.Capability(f"tried-out/{name}", f"tried_out.{name}", 1) for name in ("broken", "fine")]
    monkeypatch.setattr(groups, "capabilities", lambda only: found)
    monkeypatch.setattr("bench.bars.runner.interrupt_once", lambda: None)
    out = tmp_path / "out.json"
    assert command.main(["--only", "tried-out", "--out", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "FAIL tried-out/broken/fails: 0 bar >= 1",
        "FAIL tried-out/broken/measured: not measured; ValueError: no luck",
        "PASS tried-out/fine/holds: 1 bar >= 1",
        "1 of 3 hold; worst: tried-out/broken/fails, 0 against >= 1",
    ]
    written = json.loads(out.read_text())
    assert [bar["passed"] for bar in written["bars"]] == [False, False, True]
    assert written["machine"]["commit"] and written["machine"]["versions"]["torch"]
