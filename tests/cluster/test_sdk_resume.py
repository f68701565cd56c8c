"""The SDK and a real scheduler: connections are reset in mid-stream, and the text is as if they had not been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kadence import AsyncClient, Client, GenerateResult, RetryConfig
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.fake_verifier import FakeVerifier
from tests.support.proxy import Proxy, proxy
from tests.support.scheduling import Cluster, says, settled

QUICK = RetryConfig(initial_delay=0.02)
TEXT = "日本 over, 🙂 over th over"


async def cut_after(reset: Proxy, kind: type[Client | AsyncClient], held: int, **options: Any) -> tuple[Any, str, int]:
    """(result, text shown, resumes) of a stream whose connection is reset once `held` tokens have come."""
    loop = asyncio.get_running_loop()
    shown: list[str] = []
    tokens: list[int] = []
    went = False

    def due(chunk: Any) -> bool:
        nonlocal went
        shown.append(chunk.text)
        tokens.extend(chunk.token_ids)
        now = not went and len(tokens) >= held
        went |= now
        return now

    def run() -> tuple[GenerateResult, int]:
        with Client(reset.address, retry=QUICK) as client, client.stream(**options) as stream:
            for chunk in stream:
                if due(chunk):
                    loop.call_soon_threadsafe(reset.reset)
            return stream.result, stream.resumes

    if kind is Client:
        result, resumes = await asyncio.to_thread(run)
        return result, "".join(shown), resumes
    async with AsyncClient(reset.address, retry=QUICK) as client, client.stream(**options) as arriving:
        async for chunk in arriving:
            if due(chunk):
                reset.reset()
        return arriving.result, "".join(shown), arriving.resumes


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("stop", [None, "over the", "ver th"])
async def test_a_reset_at_every_token(
    pair: tuple[Cluster, FakeVerifier], tokenizer: Tokenizer, stop: str | None, kind: type[Client | AsyncClient]
) -> None:
    """The held-back text, half a character or the start of a stop string, is neither lost nor shown twice."""
    cluster, verifier = pair
    verifier.per_step, verifier.step_seconds = 1, 0.004
    says(verifier, [*tokenizer.encode(TEXT), tiny_model.END])
    options = {"prompt_token_ids": [5, 6, 7], "max_tokens": 100, "stop": stop}
    async with proxy(cluster.service.address) as between:
        async with AsyncClient(cluster.service.address) as client:
            uncut = await client.generate(**options)
        assert uncut.text == (TEXT if stop != "ver th" else TEXT[: TEXT.index("ver th")])
        resumed = 0
        for held in range(1, len(uncut.token_ids)):
            result, shown, resumes = await cut_after(between, kind, held, **options)
            assert result.token_ids == uncut.token_ids
            assert result.text == shown == uncut.text
            assert (result.finish_reason, result.stop_match) == (uncut.finish_reason, uncut.stop_match)
            resumed += resumes
        assert resumed >= len(uncut.token_ids) // 2  # the last tokens may have been under way already
    await settled(cluster, verifier)
