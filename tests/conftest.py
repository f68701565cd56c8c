"""Fixtures that tests of several packages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_model


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder called "tiny" without weights, for what needs a tokenizer only."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tiny_model.write(path)
    return path
