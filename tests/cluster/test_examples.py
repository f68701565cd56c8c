"""Every example runs as a user runs it, against a whole cluster with a tiny model."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.config import load_plan
from deploy.inproc import InprocCluster
from tests.support.tiny_llama import TinyLlama

ROOT = Path(__file__).resolve().parents[2]
# What each prints, beside text of a model that knows nothing.
SHOWN = {
    "quickstart": ["tokens, ended by", "acceptance length"],
    "streaming": ["finished: ", "gave up after 3 chunks"],
    "async_many": ["The square of 1 is", "The square of 12 is"],
    "logprobs": ["answer 0 (seed 1)", "answer 2 (seed 3)", "likeliest: "],
    "resume": ["Streams break. Answers need not", "resumed 2 times"],
    "chat": ["you> "],
}


@pytest.fixture(scope="module")
async def endpoint(tiny_llama: TinyLlama) -> AsyncIterator[str]:
    values = {"model.path": str(tiny_llama.folder), "scheduler.metrics_port": -1, "scheduler.drain_seconds": 0.0}
    async with InprocCluster(load_plan(None, values), name="examples") as cluster:
        yield cluster.endpoint


def test_every_example_is_run() -> None:
    elsewhere = {"in_process"}  # it brings its own model: tests/cluster/test_llm.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == SHOWN.keys() | elsewhere


@pytest.mark.parametrize("name", SHOWN)
async def test_it_runs(name: str, endpoint: str, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / f"{name}.py")),
        cwd=tmp_path,
        env={**os.environ, "KADENCE_ENDPOINT": endpoint, "KADENCE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(b"Hi\n\nAnd you?\n"), 60)
    assert process.returncode == 0, err.decode()
    assert err == b""
    assert all(words in out.decode() for words in SHOWN[name]), out.decode()
    assert name != "chat" or (out.decode().count("you> ") == 4 and "(" not in out.decode().splitlines()[-1])
