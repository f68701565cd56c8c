"""Jobs: what a plan holds, how it is shared out, and what is left after a run that was killed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kadence.errors import ConfigError
from training.jobs import Job, left, plan, shard

PROMPTS = [("math", "one two three"), ("chat", "four five six seven eight nine ten eleven twelve")]


def line(job: Job, **more: object) -> str:
    return json.dumps({"job": job.number, "task": job.label, "temperature": job.temperature, **more}) + "\n"


def test_a_plan_holds_every_prompt_and_the_turns() -> None:
    jobs = plan(PROMPTS, 3, 40, 0.5, seed=1)
    assert [job.number for job in jobs] == list(range(46))
    assert all(job.temperature == 0.5 for job in jobs)
    whole = [job for job in jobs if job.whole]
    assert Counter((job.task, job.prompt) for job in whole) == dict.fromkeys(PROMPTS, 3)
    assert Counter((job.prompt, job.lead == 0) for job in whole) == {
        (text, first): 1 if first else 2 for _, text in PROMPTS for first in (True, False)
    }
    assert all(0 <= job.lead <= 48 for job in whole)
    turns = [job for job in jobs if not job.whole]
    assert {job.lead for job in turns} == {0} and {(job.task, job.prompt) for job in turns} == set(PROMPTS)
    assert len({job.words for job in turns}) > 3 and {job.label for job in turns} == {"math-like", "chat-like"}
    assert [job.whole for job in jobs] != sorted((job.whole for job in jobs), reverse=True)  # in no order


def test_a_seed_decides_everything() -> None:
    assert plan(PROMPTS, 3, 40, 0.0, seed=1) == plan(PROMPTS, 3, 40, 0.0, seed=1)
    one, other = plan(PROMPTS, 3, 40, 0.0, seed=1), plan(PROMPTS, 3, 40, 0.0, seed=2)
    assert len({job.seed for job in one} | {job.seed for job in other}) == 92


def test_shards_part_the_jobs() -> None:
    jobs = plan(PROMPTS, 3, 40, 0.0, seed=1)
    parts = [shard(jobs, f"{i}/3") for i in range(3)]
    assert shard(jobs, "0/1") == jobs
    assert sorted(job.number for part in parts for job in part) == list(range(46))
    assert [len(part) for part in parts] == [16, 15, 15]


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "", "a/b", "0/0", "0/1/2"])
def test_wrong_shards_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard is .*; i/n is needed"):
        shard([], text)


def test_what_is_left(tmp_path: Path) -> None:
    jobs, out = plan(PROMPTS, 2, 4, 0.0, seed=1), tmp_path / "out.jsonl"
    assert left(jobs, out) == jobs and not out.exists()
    done = line(jobs[3]) + line(jobs[0], prompt_ids=[1, 2])
    out.write_text(done)
    assert left(jobs, out) == [job for job in jobs if job.number not in (0, 3)]
    assert out.read_text() == done
    out.write_text(done + line(jobs[1])[:-9])  # killed while it wrote
    assert left(jobs, out) == [job for job in jobs if job.number not in (0, 3)]
    assert out.read_text() == done
    out.write_text(line(jobs[1])[:9])
    assert left(jobs, out) == jobs and out.read_text() == ""


def test_a_file_of_other_arguments_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    jobs, out = plan(PROMPTS, 2, 4, 0.0, seed=1), tmp_path / "out.jsonl"
    wrong = [
        '{"task": "chat", "prompt": "b"}\n',
        '{"job": 8, "task": "chat"}\n',
        line(jobs[0], temperature=0.7),
        line(jobs[0], task="art"),
        "text\n",
    ]
    for text in wrong:
        out.write_text(line(jobs[1]) + text + "half a li")
        with pytest.raises(ConfigError, match=rf"{out}:2: "):
            left(jobs, out)
        assert out.read_text() == line(jobs[1]) + text + "half a li"
    out.write_text(line(jobs[1]))
    with pytest.raises(ConfigError, match=r":1: job 1, task .* these arguments make no such line"):
        left(shard(jobs, "0/2"), out)
