"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.scheduler.tokenizer import Tokenizer
from tests.support.fake_verifier import FakeVerifier
from tests.support.scheduling import Cluster, scheduler, until


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(params=["grpc", "inproc"])
async def pair(request: pytest.FixtureRequest, tokenizer_folder: Path) -> AsyncIterator[tuple[Cluster, FakeVerifier]]:
    """A scheduler and one verifier, attached."""
    async with scheduler(tokenizer_folder, request.param, max_queue=4) as cluster:
        name = "verifier" if request.param == "inproc" else ""
        async with FakeVerifier(cluster.inner, inproc_name=name) as verifier:
            await until(lambda: verifier.streams)
            yield cluster, verifier


@pytest.fixture
async def web(tokenizer_folder: Path) -> AsyncIterator[tuple[Cluster, FakeVerifier]]:
    """A scheduler with its HTTP API, and one verifier, attached."""
    async with (
        scheduler(tokenizer_folder, "inproc", http_port=0, max_queue=4) as cluster,
        FakeVerifier(cluster.inner, inproc_name="verifier") as verifier,
    ):
        await until(lambda: verifier.streams)
        yield cluster, verifier
