"""A real verifier and real block drafters: projections are handed over, sessions rebuilt, and no fc is mistaken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.drafter.config import DrafterConfig
from services.drafter.service import DrafterService
from services.runtime import config as runtime_config
from tests.cluster.test_verifier_drafting import PROMPT, Scene, scene
from tests.support.scheduling import until
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama


class Models:
    """A model, and two drafters for it that differ in everything."""

    def __init__(self, folder: Path) -> None:
        self.llama = TinyLlama(folder / "model", num_hidden_layers=TARGET_LAYERS)
        self.drafters = [write_drafter(folder / f"drafter-{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def block_drafter(transport: str, models: Models, which: int) -> AsyncIterator[DrafterService]:
    """A drafter service in this process, reached over loopback or directly."""
    settings = {
        "model.path": str(models.llama.folder),
        "model.dtype": "float32",
        "drafter.kind": "dflash2",
        "drafter.options.checkpoint": str(models.drafters[which]),
        "drafter.port": 0,
        "drafter.metrics_port": -1,
        "drafter.max_draft_tokens": 7,
    }
    config = runtime_config.load(DrafterConfig, None, "drafter", settings)
    service = DrafterService(config, inproc_name=f"block-{which}" if transport == "inproc" else None)
    await service.start()
    try:
        yield service
    finally:
        await service.drain(0)


class Talk:
    """Requests for one text; `scene` has one running, which began before there was a drafter."""

    def __init__(self, it: Scene, models: Models) -> None:
        self.it, self.models = it, models

    def begin(self, name: str, count: int) -> None:
        self.it.client.submit(name, PROMPT, count)

    async def drafts(self, name: str) -> None:
        """Some step from now on verifies a draft."""
        since = len(self.it.client.of(name).updates)
        await until(lambda: any(update.verified for update in self.it.client.of(name).updates[since:]), 15)

    async def plain(self, name: str) -> None:
        """Ten steps in a row from now on do not."""
        since = len(self.it.client.of(name).updates)
        updates = lambda: self.it.client.of(name).updates  # noqa: E731
        await until(lambda: len(updates()) > since + 10 and not any(u.verified for u in updates()[-10:]), 15)

    async def end(self, name: str) -> None:
        """Stops it; what it said is what plain decoding says."""
        self.it.client.stop(name)
        await self.it.client.ended(name)
        said = self.it.client.of(name).tokens
        self.models.llama.assert_same(PROMPT, said, self.models.llama.generate(PROMPT, len(said)))

    async def connected(self, drafter: DrafterService) -> None:
        self.it.offer(drafter.address)
        wanted = drafter._description.feature_fingerprint
        await until(lambda: self.it.verifier.service._engine._features.fingerprint == wanted, 15)

    async def rows_sent(self) -> float:
        return await self.it.verifier.metric("kadence_drafter_feature_rows_total")


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
async def test_restart_and_change(models: Models, transport: str) -> None:
    """A running request drafts on after a restart, not after a change; the next one does. No text changes."""
    async with scene(models.llama, draft_deadline_seconds=5.0) as it:
        talk = Talk(it, models)
        async with block_drafter(transport, models, 0) as first:
            await talk.connected(first)
            await talk.plain("a")  # its first tokens have no rows
            await talk.end("a")
            talk.begin("b", 2000)
            await talk.drafts("b")
        await talk.plain("b")
        sent, length = await talk.rows_sent(), len(it.client.of("b").tokens)
        async with block_drafter(transport, models, 0) as again:
            it.offer(again.address)
            await talk.drafts("b")
            assert await talk.rows_sent() >= sent + length
        await talk.plain("b")
        async with block_drafter(transport, models, 1) as other:
            await talk.connected(other)
            talk.begin("c", 2000)
            await talk.drafts("c")
            await talk.plain("b")
            await talk.end("b")
            await talk.end("c")
        assert await it.events("stale") == 0 and await it.events("resyncs") == 0
        await it.verifier.check_empty()
