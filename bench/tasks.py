"""Prompts by task, from a folder of `{"task": ..., "prompt": ...}` lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kadence.errors import ConfigError

OURS = Path(__file__).parent / "prompts"


@dataclass(frozen=True)
class Prompts:
    """Prompts of several tasks, each in the order of its file."""

    by_task: dict[str, list[str]]

    @classmethod
    def read(cls, folder: Path) -> Prompts:
        """Reads every .jsonl file of the folder. Raises ConfigError, one line, for what is not such a folder."""
        by_task: dict[str, list[str]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    by_task.setdefault(str(record["task"]), []).append(str(record["prompt"]))
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(f'{path}:{number}: not a line of {{"task": ..., "prompt": ...}}') from None
        if not by_task:
            raise ConfigError(f"{folder}: no prompts there; a folder with .jsonl files is wanted")
        return cls(by_task)

    def take(self, count: int) -> list[str]:
        """`count` prompts, of each task in turn; from the start again if there are fewer."""
        longest = max(len(prompts) for prompts in self.by_task.values())
        mixed = [prompts[i] for i in range(longest) for prompts in self.by_task.values() if i < len(prompts)]
        return [mixed[i % len(mixed)] for i in range(count)]
