"""What a capability's measurement is given."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.tasks import Prompts
from kadence.errors import ConfigError


@dataclass(frozen=True)
class Bench:
    """The run's prompts and manners. Crosses into the measuring process, so it holds plain data only."""

    name: str
    """Group and capability, for progress lines."""
    prompts: Prompts
    quick: bool
    """A try-out: much fewer samples, numbers that mean nothing."""
    begun: float
    """time.monotonic() at the start of the run."""
    drafter: Path | None = None
    """Folder of the drafter's checkpoint."""
    features: Path | None = None
    """Folder of features to train on."""
    start: Path | None = None
    """Folder of the checkpoint that training begins with."""

    def checkpoint(self) -> Path:
        """The drafter's checkpoint. Raises ConfigError if there is none."""
        if self.drafter is None:
            raise ConfigError("no drafter to measure: --drafter FOLDER names a checkpoint")
        return self.drafter

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self.begun:6.1f} s] {self.name}: {text}", file=sys.stderr, flush=True)

    def rounds(self, count: int) -> int:
        """How often to repeat what a full run repeats `count` times."""
        return max(2, count // 8) if self.quick else count
