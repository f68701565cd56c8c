"""Files, functions and classes stay small enough to read in one go."""

from __future__ import annotations

import ast

import pytest

from tests.shape.source_tree import Source, sources

MAX_FILE, MAX_FUNCTION, MAX_CLASS, MAX_DEPTH = 400, 60, 200, 3


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("source", sources(), ids=lambda s: s.path)
def test_sizes(source: Source) -> None:
    too_long = []
    if (lines := source.text.count("\n")) > MAX_FILE:
        too_long.append(f"{source.path}: {lines} lines, at most {MAX_FILE}")
    for node in ast.walk(source.tree):
        limit = MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and length(node) > limit:
            too_long.append(f"{source.path}:{node.lineno} {node.name}: {length(node)} lines, at most {limit}")
    assert not too_long, "\n".join(too_long)


def test_folders_are_at_most_three_levels_deep() -> None:
    deep = [s.path for s in sources() if s.path.count("/") > MAX_DEPTH]
    assert not deep
