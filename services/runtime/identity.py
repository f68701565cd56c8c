"""Who this process is: package version and replica id."""

from __future__ import annotations

import importlib.metadata
import uuid


def version() -> str:
    """Version of the installed package; "0" where it runs from a bare checkout."""
    try:
        return importlib.metadata.version("kadence")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def replica_id(kind: str) -> str:
    """A new id, unique per process start: "drafter-1f0c9a2b"."""
    return f"{kind}-{uuid.uuid4().hex[:8]}"
