"""Conversations as token ids: lines of files, and what of them is worth learning from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kadence.errors import ConfigError

LONGEST = 512
"""Tokens of a conversation, prompt included, that are learnt from."""
LOOP = 16
"""An answer that repeats so many tokens in a row has begun to loop; loops flatter any drafter."""


@dataclass(frozen=True)
class Conversation:
    """A prompt, chat template included, and the target's answer."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """Names it: 16 bytes over both lists."""
        return hashlib.sha256(json.dumps([self.prompt, self.response]).encode()).digest()[:16]


def before_loop(ids: Sequence[int], size: int = LOOP) -> int:
    """How many leading tokens there are until an n-gram of `size` tokens has come a second time, those included."""
    seen: set[tuple[int, ...]] = set()
    for end in range(size, len(ids) + 1):
        gram = tuple(ids[end - size : end])
        if gram in seen:
            return end
        seen.add(gram)
    return len(ids)


def read(paths: Sequence[Path], vocab_size: int, longest: int = LONGEST) -> list[Conversation]:
    """The lines {"prompt_ids": [...], "response_ids": [...]} of all files, each conversation once, in their order.

    Answers are cut where they loop, and everything to `longest` tokens; lines without an answer of two tokens are left
    out. Raises ConfigError naming file, line and value, or the files if they hold no answers at all.
    """
    found: dict[Conversation, None] = {}
    for path in paths:
        for where, line in lines(path):
            prompt, response = (_ids(line, key, where, vocab_size) for key in ("prompt_ids", "response_ids"))
            response = response[: before_loop(response)][: max(0, longest - len(prompt))]
            if prompt and len(response) > 1:
                found[Conversation(prompt, response)] = None
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no answers of two tokens there")
    return list(found)


def read_prompts(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Task and text of the lines {"task": ..., "prompt": ...} of all files, a folder being its .jsonl files by name.

    Raises ConfigError naming file, line and value, or what holds no prompts.
    """
    found: list[tuple[str, str]] = []
    for path in paths:
        before = len(found)
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            for where, line in lines(file):
                for key in ("task", "prompt"):
                    if not isinstance(line.get(key), str) or not line[key]:
                        raise ConfigError(f"{where}: {key} is {line.get(key)!r}; a text is needed")
                found.append((line["task"], line["prompt"]))
        if len(found) == before:
            raise ConfigError(f'{path}: no prompts there; lines {{"task": ..., "prompt": ...}} are needed')
    return found


def spread(prompts: Sequence[str], count: int) -> list[str]:
    """At most `count` of the prompts, evenly spread over all of them: benchmarks list theirs kind by kind."""
    count = min(count, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def lines(path: Path, size: int | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """How errors name it, and what it holds, of each line of a file (its first `size` bytes), a JSON object each.

    Empty ones are left out. Raises ConfigError naming file and line.
    """
    try:
        text = path.read_bytes()[:size].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() splits inside of JSON's strings, too
        if line.strip():
            where = f"{path}:{number}"
            yield where, _object(line, where)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {data!r}; an object is needed")
    return data


def _ids(line: dict[str, Any], key: str, where: str, vocab_size: int) -> tuple[int, ...]:
    ids = line.get(key, [])
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: {key} is {ids!r}; a list of token ids is needed")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(f"{where}: {key} holds {token!r}; ids from 0 to {vocab_size - 1} are needed")
    return tuple(ids)
