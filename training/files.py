"""Files that are there as a whole or not at all, whatever interrupts their making."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` make a file beside `path`, and moves it there. Raises OSError; the old file stays then."""
    part = path.with_suffix(".part")
    try:
        write(part)
    except (OSError, RuntimeError, SafetensorError) as error:  # what torch and safetensors make of a full disk
        part.unlink(missing_ok=True)
        raise OSError(f"{path}: cannot be written, the disk may be full: {str(error).splitlines()[0]}") from error
    os.replace(part, path)
