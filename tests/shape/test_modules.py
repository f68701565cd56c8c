"""Every module says what it is, exports in order, and names no path of the machine it was written on."""

from __future__ import annotations

import ast
import re

import pytest

from tests.shape.source_tree import ROOT, Source, sources, tracked_files

# Homes and work folders of some machine. System folders such as /proc or /dev/null are no machine's own.
MACHINE_PATH = re.compile(r"(?<![\w.$}~])/(?:root|home|work|Users|mnt)/[\w.-]")
BINARY = (".png", ".jpg", ".safetensors", ".npz", ".gguf", ".ico", ".pdf", ".binpb")


@pytest.mark.parametrize("source", sources(), ids=lambda s: s.path)
def test_opens_with_a_sentence(source: Source) -> None:
    docstring = ast.get_docstring(source.tree)
    assert docstring, f"{source.path} has no module docstring"
    first = docstring.split("\n\n")[0]
    assert first.rstrip().endswith((".", "?", "!")), f"{source.path}: the docstring does not open with a sentence"


@pytest.mark.parametrize("source", sources(), ids=lambda s: s.path)
def test_exports_are_sorted(source: Source) -> None:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names = ast.literal_eval(node.value)
            order = sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
            assert list(names) == order, f"{source.path}: __all__ is not CONSTANTS, Classes, functions, each sorted"


def test_no_machine_paths() -> None:
    found = []
    for name in tracked_files():
        if name.endswith(BINARY):
            continue
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


def test_the_pattern_finds_machine_paths() -> None:
    assert MACHINE_PATH.search('open("' + "/".join(["", "home", "me", "x"]) + '")')
    assert not MACHINE_PATH.search("$KADENCE_HOME/work/x or ~/home/x or deploy/work/x")
