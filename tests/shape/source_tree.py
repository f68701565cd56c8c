"""The repository's Python files, read once and parsed, for the shape tests."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kadence", "services", "deploy", "bench", "training", "examples", "tests")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True)
class Source:
    """One hand-written Python file; `path` is relative to the repository, with forward slashes."""

    path: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """Dotted name: services/runtime/server.py -> services.runtime.server."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import, also those inside functions; `from a import b` gives a.b."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.path.split("/")[: -node.level]
        return ".".join([*parts, node.module] if node.module else parts)


def tracked_files() -> list[str]:
    """Every file git knows or would add, so that a file is judged before its first commit."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in names if name and (ROOT / name).is_file())


def sources() -> list[Source]:
    """All hand-written Python files of the project's packages."""
    return [
        Source(name)
        for name in tracked_files()
        if name.endswith(".py") and not name.endswith(GENERATED) and name.split("/")[0] in PACKAGES
    ]
