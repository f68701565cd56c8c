"""Where Kadence keeps its files for one user, and the record of the cluster that `kadence up` started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kadence.errors import ConfigError


def home() -> Path:
    """The user's Kadence folder: $KADENCE_HOME, else ~/.kadence. It may not exist yet."""
    return Path(os.environ.get("KADENCE_HOME") or Path.home() / ".kadence")


def state_path() -> Path:
    """The file that describes the running cluster; it exists while one runs."""
    return home() / "cluster.json"


def read_state() -> dict[str, Any] | None:
    """The running cluster's record, or None. Raises ConfigError if the file is damaged."""
    path = state_path()
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise ConfigError(f"{path.parent}: is not a folder") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it if no cluster is running") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: must hold one JSON object; remove it if no cluster is running")
    return state


def write_state(state: Mapping[str, Any]) -> None:
    """Replaces the record in one step, so that a reader never sees half of it."""
    path = state_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(dict(state), indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def remove_state() -> None:
    """Forgets the cluster; fine if there is no record."""
    state_path().unlink(missing_ok=True)


def find_endpoint(explicit: str | None) -> str:
    """The "host:port" to dial: what was given, else $KADENCE_ENDPOINT, else that of the running local cluster.

    Raises ConfigError if there is none or it is malformed.
    """
    for origin, endpoint in (("endpoint", explicit), ("KADENCE_ENDPOINT", os.environ.get("KADENCE_ENDPOINT"))):
        if endpoint:
            return _checked(origin, endpoint)
    state = read_state()
    if state is None:
        raise ConfigError("no cluster is known: start one with `kadence up`, or set KADENCE_ENDPOINT=host:port")
    return _checked(str(state_path()), str(state.get("endpoint", "")))


def _checked(origin: str, endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{origin}: {endpoint!r} is not host:port with a port of 1 to 65535")
    return endpoint
