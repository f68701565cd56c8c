"""What the documents name exists: files they link to or mention, make targets, commands."""

from __future__ import annotations

import re

import pytest

from tests.shape.source_tree import ROOT, tracked_files

DOCUMENTS = [name for name in tracked_files() if name.endswith(".md")]
TOP_FOLDERS = ("kadence", "services", "deploy", "protos", "bench", "tests", "examples", "training", "models", "docs")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text(name))
    missing = [target for target in targets if not ((ROOT / name).parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_mentioned_paths_exist(name: str) -> None:
    mentioned = re.findall(rf"`((?:{'|'.join(TOP_FOLDERS)})/[\w./*-]*)`", text(name))
    missing = [path for path in mentioned if not list(ROOT.glob(path.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    asked = set(re.findall(r"(?:^|`)make ([a-z-]+)", text(name), re.MULTILINE))
    assert asked <= targets
