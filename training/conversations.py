"""Conversations as token ids: lines of a file, and what of them is worth learning from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kadence.errors import ConfigError

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


def before_loop(ids: tuple[int, ...], size: int = LOOP) -> int:
    """How many leading tokens there are until an n-gram of `size` tokens has come a second time, those included."""
    seen: set[tuple[int, ...]] = set()
    for end in range(size, len(ids) + 1):
        gram = ids[end - size : end]
        if gram in seen:
            return end
        seen.add(gram)
    return len(ids)


def read(paths: Iterable[Path], vocab_size: int, longest: int) -> list[Conversation]:
    """The lines {"prompt_ids": [...], "response_ids": [...]} of all files, each conversation once, in their order.

    Answers are cut where they loop, and everything to `longest` tokens; lines without an answer of two tokens are left
    out. Raises ConfigError naming file, line and value.
    """
    found: dict[Conversation, None] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
            prompt, response = (
                _ids(data, key, f"{path}:{number}", vocab_size) for key in ("prompt_ids", "response_ids")
            )
            response = response[: before_loop(response)][: max(0, longest - len(prompt))]
            if prompt and len(response) > 1:
                found[Conversation(prompt, response)] = None
    return list(found)


def _ids(data: object, key: str, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {data!r}; an object is needed")
    ids = data.get(key, [])
    if not isinstance(ids, list):
        raise ConfigError(f"{where}: {key} is {ids!r}; a list of token ids is needed")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(f"{where}: {key} holds {token!r}; ids from 0 to {vocab_size - 1} are needed")
    return tuple(ids)
