"""Finds the groups of bars and their capabilities: packages here, and modules in them."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

import bench.bars
from kadence.errors import ConfigError


@dataclass(frozen=True)
class Capability:
    """One module that measures: `name` is "group/capability"."""

    name: str
    module: str
    minutes: float
    """About how long it takes."""


def groups() -> list[str]:
    """Names of all groups, as `--only` takes them."""
    return [_spoken(found.name) for found in pkgutil.iter_modules(bench.bars.__path__) if found.ispkg]


def capabilities(only: str = "") -> list[Capability]:
    """Those of one group ("first-light"), a single one ("first-light/speed"), or all; quick ones first.

    Raises ConfigError for a name that is neither.
    """
    found = [capability for group in groups() for capability in _of(group)]
    chosen = [c for c in found if not only or only in (c.name, c.name.partition("/")[0])]
    if not chosen:
        raise ConfigError(f"no bars called {only}; there are {', '.join([*groups(), *(c.name for c in found)])}")
    return sorted(chosen, key=lambda capability: (capability.minutes, capability.name))


def _of(group: str) -> list[Capability]:
    package = importlib.import_module(f"bench.bars.{group.replace('-', '_')}")
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        name = f"{package.__name__}.{module.name}"
        found.append(Capability(f"{group}/{_spoken(module.name)}", name, importlib.import_module(name).MINUTES))
    return found


def _spoken(name: str) -> str:
    return name.replace("_", "-")
