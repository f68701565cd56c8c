"""Ranks the ids of a model by how often its answers hold them, for a drafter that scores only the most frequent ones.

python -m training.vocabulary --data FILE.jsonl ... --model MODEL --out draft_vocabulary.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError
from services.model.arch import read_arch, read_json
from services.model.fetch import resolve
from training.command import ended
from training.conversations import read


def rank(responses: Iterable[Sequence[int]], vocab_size: int, ends: list[int]) -> list[int]:
    """All ids below `vocab_size`: `ends` first, then by count in `responses`, ties to the smaller id.

    Ids of no response come last in their own order, which in byte-pair vocabularies is that of the merges.
    """
    counts: Counter[int] = Counter()
    for ids in responses:
        counts.update(ids)
    first = sorted(set(ends))
    rest = sorted(set(range(vocab_size)) - set(first), key=lambda token: (-counts[token], token))
    return first + rest


def end_ids(folder: Path, vocab_size: int) -> list[int]:
    """The ids that end an answer, by config.json and generation_config.json."""
    found: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        value = read_json(file).get("eos_token_id") if file.exists() else None
        found += value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in found):
        raise CheckpointError(f"{folder}: eos_token_id is {found!r}; ids from 0 to {vocab_size - 1} are needed")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.vocabulary", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="what `python -m training.data` wrote")
    parser.add_argument("--model", required=True, help="the target: a folder, or a name of `kadence models list`")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    args = parser.parse_args(arguments)
    return ended(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    folder = resolve(args.model)
    size = read_arch(folder).vocab_size
    ranked = rank((one.response for one in read(args.data, size)), size, end_ids(folder, size))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"token_ids": ranked}))


if __name__ == "__main__":
    sys.exit(main())
