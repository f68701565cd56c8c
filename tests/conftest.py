"""Fixtures that tests of several packages share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import tiny_model

if TYPE_CHECKING:
    from tests.support.tiny_llama import TinyLlama

# Tiny tensors gain nothing from more threads, and on a busy machine threads that wait for each other lose much. Set
# before torch is imported; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell makes its background jobs ignore SIGINT, and child processes inherit that: no Ctrl-C would reach them.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder called "tiny" without weights, for what needs a tokenizer only."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    tiny_model.write(path)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """A random model of two layers with a tokenizer, and what transformers generates with it."""
    from tests.support.tiny_llama import TinyLlama

    return TinyLlama(tmp_path_factory.mktemp("models") / "tiny-llama")
