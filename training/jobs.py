"""Which conversations a run makes: a list of jobs that its arguments and one seed decide, and what is left of it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kadence.errors import ConfigError
from training.conversations import lines

_LONGEST_LEAD = 48  # tokens
_BEGINNINGS = (0, 1, 2, 3, 4, 6, 8)  # words


@dataclass(frozen=True)
class Job:
    """One conversation to make.

    A prompt that is not `whole` is a user turn of which the target keeps only the beginning, `words` words, and writes
    the rest: prompts that nobody had to collect, in the target's own words.

    The answer's first `lead` tokens are sampled at temperature 1, the rest is drawn at `temperature`: a greedy answer
    to a prompt is always the same, after different leads there are as many as one likes, and nearly all of their
    tokens are what the target says at the temperature at which it will be served.
    """

    number: int
    task: str
    prompt: str
    whole: bool
    words: int
    lead: int
    temperature: float
    seed: int

    @property
    def label(self) -> str:
        """The task that its line names."""
        return self.task if self.whole else f"{self.task}-like"


def plan(prompts: Sequence[tuple[str, str]], answers: int, turns: int, temperature: float, seed: int) -> list[Job]:
    """`answers` jobs for each prompt, (task, text), the first without a lead, and `turns` that begin like one of them.

    In an order drawn by `seed`, as everything else is, so that any first part of it is a fair sample.
    """
    draw = random.Random(seed)
    found: list[tuple[str, str, bool, int, int]] = []
    for task, text in prompts:
        for answer in range(answers):
            found.append((task, text, True, 0, 0 if answer == 0 else draw.randint(1, _LONGEST_LEAD)))
    for _ in range(turns):
        task, text = draw.choice(prompts)
        found.append((task, text, False, draw.choice(_BEGINNINGS), 0))
    draw.shuffle(found)
    return [Job(number, *job, temperature, draw.getrandbits(31)) for number, job in enumerate(found)]


def shard(jobs: Sequence[Job], text: str) -> list[Job]:
    """Every n-th job from the i-th on, counted from 0, by "i/n". Raises ConfigError."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ConfigError(f"--shard is {text!r}; i/n is needed, i from 0 to n - 1")
    return list(jobs[int(part) :: int(parts)])


def left(jobs: Sequence[Job], out: Path) -> list[Job]:
    """Those of `jobs` that the file `out` has no line of; half a last line, of a run that was killed, is cut off.

    Raises ConfigError, and leaves the file as it is, if other arguments than those of `jobs` have made it.
    """
    if not out.exists():
        return list(jobs)
    whole = _whole_lines(out)
    wanted, done = {job.number: job for job in jobs}, set()
    for where, line in lines(out, whole):
        number = line.get("job")
        job = wanted.get(number) if type(number) is int else None
        if job is None or line.get("task") != job.label or line.get("temperature", job.temperature) != job.temperature:
            made = f"job {number!r}, task {line.get('task')!r}, temperature {line.get('temperature')!r}"
            raise ConfigError(f"{where}: {made}; these arguments make no such line, give another --out")
        done.add(number)
    if whole < out.stat().st_size:
        os.truncate(out, whole)
    return [job for job in jobs if job.number not in done]


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last line that has one."""
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
