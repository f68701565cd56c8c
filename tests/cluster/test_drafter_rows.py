"""A real dflash2 drafter, as a process over loopback and inside this one: rows in, drafts with q and signals out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kadence.errors import InternalError, InvalidRequestError
from kadence.internal import common_pb2, drafter_pb2_grpc
from kadence.internal import drafter_pb2 as pb
from kadence.v1 import types_pb2
from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_weights import load_draft
from services.drafter.methods.block import BlockMethod
from services.runtime.channels import connect
from tests.cluster.test_drafter_service import Drafter, drafts, resyncs, running, stamp, streaming
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama

WIDTH = 64
SAMPLED = common_pb2.Sampling(temperature=1.5, top_p=1.0, seed=3, rule=types_pb2.RULE_RATIO)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model and its drafter."""
    model = TinyLlama(tmp_path_factory.mktemp("model"), num_hidden_layers=TARGET_LAYERS).folder
    return model, write_drafter(tmp_path_factory.mktemp("drafter"))


def settings(folders: tuple[Path, Path]) -> dict[str, Any]:
    model, checkpoint = folders
    named = {"kind": "dflash2", "model.path": model, "options.checkpoint": checkpoint, "options.dtype": "float32"}
    return {**{key: str(value) for key, value in named.items()}, "kv_tokens": 64}


@pytest.fixture(params=["grpc", "inproc"])
async def drafter(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> AsyncIterator[Drafter]:
    async with running(request.param, **settings(folders)) as it:
        yield it


@pytest.fixture
async def local(folders: tuple[Path, Path]) -> AsyncIterator[Drafter]:
    async with running("inproc", **settings(folders)) as it:
        yield it


@pytest.fixture(scope="module")
def fingerprint(folders: tuple[Path, Path]) -> str:
    return load_draft(folders[1], read_draft_arch(folders[1]), torch.float32).projection.fingerprint


def commit(name: str, base: int, tokens: list[int], rows: tuple[int, int], fingerprint: str) -> pb.SessionCommit:
    """Tokens from `base` on, and the rows of the positions rows[0] .. rows[1] - 1 of one long made-up text."""
    first, end = rows
    text = torch.randn((200, WIDTH), generator=torch.Generator().manual_seed(0))
    it = pb.SessionCommit(stamp=stamp(name, base), token_ids=tokens)
    if first < end:
        data = text[first:end].numpy().tobytes()
        tensor = common_pb2.Tensor(dtype=common_pb2.DTYPE_FLOAT32, shape=[end - first, WIDTH], data=data)
        it.feature_rows.CopyFrom(tensor)
        it.feature_base, it.feature_fingerprint = first, fingerprint
    return it


def opening(name: str) -> list[pb.SessionOpen]:
    return [pb.SessionOpen(stamp=stamp(name))]


def wish(name: str, base: int, sampling: common_pb2.Sampling | None = None) -> list[pb.Propose]:
    return [pb.Propose(stamp=stamp(name, base), max_tokens=5, sampling=sampling)]


async def test_handshake_and_projection(drafter: Drafter, folders: tuple[Path, Path], fingerprint: str) -> None:
    async with connect(drafter_pb2_grpc.DrafterServiceStub, drafter.address) as stub:
        it = (await stub.DescribeDrafter(pb.DescribeDrafterRequest(), timeout=5)).drafter
        assert (it.drafter_kind, it.block_size, it.max_draft_tokens, list(it.taps)) == ("dflash2", 8, 7, [0, 2])
        assert (it.feature_width, it.feature_fingerprint, it.kv_tokens) == (WIDTH, fingerprint, 64)
        assert it.model_fingerprint and it.supports_ratio and len(it.signals) == 7 and it.max_rows > 0
        stored = load_file(folders[1] / "model.safetensors")
        got: dict[str, bytes] = {}
        async for piece in stub.FetchProjection(pb.FetchProjectionRequest(), timeout=5):
            assert piece.offset == len(got.get(piece.name, b"")) and list(piece.shape) == list(stored[piece.name].shape)
            got[piece.name] = got.get(piece.name, b"") + piece.data
        assert got == {name: stored[name].numpy().tobytes() for name in ("fc.weight", "hidden_norm.weight")}


async def test_drafts_of_sessions_together(drafter: Drafter, fingerprint: str) -> None:
    async with streaming(drafter) as stream:
        response = await stream.ask(
            opens=opening("a") + opening("b"),
            commits=[commit("a", 0, [7] * 20, (0, 19), fingerprint), commit("b", 0, [9] * 3, (0, 2), fingerprint)],
            proposes=wish("a", 20) + wish("b", 3, SAMPLED),
        )
        greedy, sampled = response.drafts
        assert len(greedy.token_ids) == 5 and not greedy.HasField("q") and list(greedy.signals.shape) == [5, 7]
        ids = np.frombuffer(sampled.q.token_ids.data, np.int32).reshape(sampled.q.token_ids.shape)
        law = np.frombuffer(sampled.q.probabilities.data, np.float32).reshape(sampled.q.probabilities.shape)
        assert ids.shape == law.shape == (5, 16) and np.allclose(law.sum(1), 1, atol=1e-5)
        for k, token in enumerate(sampled.token_ids):
            assert law[k][ids[k] == token].item() > 0
        # The same round again, alone: a retry replays.
        again = await stream.ask(proposes=wish("b", 3, SAMPLED))
        assert again.drafts[0] == sampled
        assert await drafter.metric("kadence_drafter_feature_rows_total") == 21
        assert await drafter.metric("kadence_drafter_kv_tokens") == 21


async def test_missing_rows_are_asked_for(local: Drafter, fingerprint: str) -> None:
    async with streaming(local) as stream:
        whole = [commit("a", 0, [7] * 20, (0, 19), fingerprint)]
        wanted = drafts(await stream.ask(opens=opening("a"), commits=whole, proposes=wish("a", 20)))
        part = [commit("b", 0, [7] * 20, (0, 4), fingerprint)]
        assert resyncs(await stream.ask(opens=opening("b"), commits=part, proposes=wish("b", 20))) == {"b": 5}
        rest = [commit("b", 20, [], (4, 12), fingerprint), commit("b", 20, [], (12, 19), fingerprint)]
        assert drafts(await stream.ask(commits=rest, proposes=wish("b", 20)))["b"] == wanted["a"]


async def test_no_room_for_a_text(local: Drafter, fingerprint: str) -> None:
    async with streaming(local) as stream:
        long = [commit("a", 0, [7] * 51, (0, 50), fingerprint)]
        await stream.ask(opens=opening("a"), commits=long, proposes=wish("a", 51))
        other = {"opens": opening("b"), "commits": [commit("b", 0, [7] * 20, (0, 19), fingerprint)]}
        assert resyncs(await stream.ask(**other, proposes=wish("b", 20))) == {"b": 0}
        assert await local.metric("kadence_drafter_sessions") == 1
        await stream.ask(closes=[pb.SessionClose(stamp=stamp("a"))], proposes=wish("c", 1))
        assert drafts(await stream.ask(**other, proposes=wish("b", 20)))["b"]


async def test_rows_of_another_projection_end_the_stream(local: Drafter) -> None:
    async with streaming(local) as stream:
        stream.send(opens=opening("a"), commits=[commit("a", 0, [7] * 3, (0, 2), "another")], proposes=wish("a", 3))
        with pytest.raises(
            InvalidRequestError, match=r"feature_fingerprint: is 'another'; this drafter's is '[0-9a-f]+"
        ):
            await stream.receive()


async def test_a_pass_that_fails_ends_its_stream_and_nothing_else(
    folders: tuple[Path, Path], fingerprint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = BlockMethod._draft

    def failing(self: BlockMethod, items: Any, anchors: list[int]) -> Any:
        if 99 in anchors:
            raise RuntimeError("the pass fails")
        return whole(self, items, anchors)

    monkeypatch.setattr(BlockMethod, "_draft", failing)
    async with (
        running("inproc", **settings(folders)) as drafter,
        streaming(drafter) as good,
        streaming(drafter) as bad,
    ):
        rows = [commit("a", 0, [7] * 3, (0, 2), fingerprint)]
        await good.ask(opens=opening("a"), commits=rows, proposes=wish("a", 3))
        rows = [commit("a", 0, [99] * 3, (0, 2), fingerprint)]
        bad.send(opens=opening("a"), commits=rows, proposes=wish("a", 3))
        with pytest.raises(InternalError):
            await bad.receive()
        await asyncio.sleep(0.1)
        assert await drafter.metric("kadence_drafter_sessions") == 1
        assert drafts(await good.ask(proposes=wish("a", 3)))["a"]
