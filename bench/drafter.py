"""The drafter that is measured: its checkpoint, how a cluster is told of it, and what its drafts brought."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.load import Answer
from bench.machine import ROOT
from kadence.errors import ConfigError

OURS = ROOT / "models" / "smollm2-135m-instruct-dflash2"
BLOCK_DRAFTS = 7
"""What a block of 8 drafts."""
VOCABULARY = 8192
"""Size of the draft vocabulary where one is used."""


def found(chosen: Path | None) -> Path | None:
    """The checkpoint's folder: `chosen`, else this repository's own, if it is there. Raises ConfigError."""
    folder = chosen or OURS
    if not (folder / "config.json").exists():
        if chosen is None:
            return None
        raise ConfigError(f"{folder}: no drafter's checkpoint there")
    return folder.resolve()


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Configuration of a cluster that drafts with the checkpoint, whole blocks; `more` has "__" for dots.

    A step waits for its draft as long as it takes, so that acceptance does not depend on the machine's load.
    """
    return {
        "drafter.kind": "dflash2",
        "drafter.options.checkpoint": str(folder),
        "policy.name": f"fixed:{BLOCK_DRAFTS}",
        "verifier.draft_deadline_seconds": 30,
        **{name.replace("__", "."): value for name, value in more.items()},
    }


def draft_vocabulary(folder: Path, scratch: Path) -> Path:
    """The file beside the checkpoint that ranks ids, else one in `scratch`, ranked by the data in the folder above.

    Raises ConfigError if there is neither.
    """
    beside, data = folder / "draft_vocabulary.json", folder.parent / "data.jsonl"
    if beside.exists():
        return beside
    if not data.exists():
        raise ConfigError(f"no draft vocabulary: neither {beside} nor {data}")
    counts: Counter[int] = Counter()
    for line in data.read_text(encoding="utf-8").split("\n"):
        counts.update(json.loads(line)["response_ids"] if line else ())
    ranked = scratch / beside.name
    ranked.write_text(json.dumps({"token_ids": [token for token, _ in counts.most_common()]}), encoding="utf-8")
    return ranked


def steps(answer: Answer) -> list[int]:
    """Tokens of each step of an answer that ran alone, its first token apart, which the prompt's step gave."""
    lengths = [count for _, count in answer.arrivals]
    told = answer.result.stats
    assert lengths[0] == 1 and len(lengths) == told.steps + 1, f"{len(lengths)} chunks of {told.steps} steps"
    return lengths[1:]


def within(lengths: Sequence[int], tokens: int) -> list[int]:
    """The first of the steps, as many as end within the answer's first `tokens` tokens."""
    kept, end = [], 1
    for length in lengths:
        end += length
        if end > tokens:
            break
        kept.append(length)
    return kept


def by_place(lengths: Sequence[int]) -> dict[int, int]:
    """Tokens of each step by the number of tokens that the answer had before it."""
    place, found = 1, {}
    for length in lengths:
        found[place] = length
        place += length
    return found
