"""The drafter's own, smaller vocabulary: the ids its head scores, the most frequent ones of a ranking in a file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from kadence.errors import ConfigError


def read_draft_vocabulary(path: Path, size: int, vocab_size: int) -> Tensor:
    """The first `size` ids of a file {"token_ids": [most frequent first]}, ascending: int64 [size].

    Raises ConfigError naming file and value: unreadable, not such a list, ids outside 0 .. vocab_size - 1, an id
    twice, fewer than `size`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "; `python -m training.vocabulary` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    ids = data.get("token_ids") if isinstance(data, dict) else None
    if not isinstance(ids, list):
        raise ConfigError(f'{path}: an object with a list "token_ids" is needed')
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(f"{path}: token_ids holds {token!r}; ids from 0 to {vocab_size - 1} are needed")
    if len(set(ids)) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ConfigError(f"{path}: token_ids holds {twice} more than once")
    if not 0 < size <= len(ids):
        raise ConfigError(f"{path}: {size} token ids are wanted; it ranks {len(ids)}")
    return torch.tensor(sorted(ids[:size]), dtype=torch.int64)
