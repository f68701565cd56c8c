"""The drafters that come with Kadence: one folder each, found by its name."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from kadence.errors import CheckpointError

_CHECKOUT = Path(__file__).resolve().parents[2]
# Installed from a wheel, this file lies in site-packages, and the folders where pyproject.toml's data-files put them.
_INSTALLED = Path(sysconfig.get_path("data")) / "share" / "kadence"
ROOT = (_CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() else _INSTALLED) / "models"


def drafters() -> dict[str, Path]:
    """The drafters there are, name to folder, sorted by name."""
    return {path.parent.name: path.parent for path in sorted(ROOT.glob("*/config.json"))}


def find_drafter(checkpoint: str | Path) -> Path:
    """The folder of a drafter's checkpoint: a folder itself, or the name of a shipped one. Raises CheckpointError."""
    folder = Path(os.path.expanduser(checkpoint))  # as it is where there is no such user
    if folder.is_dir():
        return folder
    shipped = drafters()
    if str(checkpoint) in shipped:
        return shipped[str(checkpoint)]
    known = ", ".join(shipped) or "none"
    raise CheckpointError(f"{checkpoint}: no such folder, and not a shipped drafter; shipped here: {known}")
