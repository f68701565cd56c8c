"""The row store: which layers it reads, which rows it gives back, whose they are; and how its weights come over."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from kadence.errors import ConfigError
from kadence.internal import common_pb2
from kadence.internal import drafter_pb2 as pb
from services.model.arch import Arch
from services.model.projection import ProjectionWeights
from services.model.rope_parameters import RopeParameters
from services.verifier import batch
from services.verifier.features import FeatureStore
from services.verifier.paged_kv import PageList, PagePool, allocate_caches
from services.verifier.projection_transfer import fetch
from services.verifier.target import Target
from tests.support.rows_drafter import projection

LAYERS, HIDDEN, PAGE = 5, 8, 4
ARCH = Arch("llama", HIDDEN, 16, LAYERS, 2, 2, 4, 30, 64, RopeParameters(1e4), 1e-5, False, "float32", mlp_bias=True)


class Powers:
    """Weights with which layer l adds 10^l to every element of the residual stream, which begins at 0."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        layer = int(name.split(".")[2]) if "layers" in name else 0
        return torch.full(shape, float(10**layer) if "down_proj.bias" in name else 0.0, dtype=dtype)


@pytest.mark.parametrize(("taps", "sums"), [((0,), [1]), ((0, 2), [1, 111]), ((1, 2, 3), [11, 111, 1111]), ((), [])])
def test_a_tap_is_what_leaves_its_layer(taps: tuple[int, ...], sums: list[int]) -> None:
    """Not what enters it, and not normalised (draft-model contracts, section 11, check 3)."""
    target = Target.built(ARCH, Powers(), torch.float32)
    target.prepare(64)
    _, layout = batch.attention_for(target, 4, PAGE)
    forward, _ = batch.plan([batch.Work([3, 4, 5], 0, 1, [0])], layout)
    caches = allocate_caches(ARCH, 4, PAGE, torch.float32)
    logits, tapped = target.forward_tapped(forward, caches, None, taps)
    assert [t.tolist() for t in tapped] == [[[float(total)] * HIDDEN] * 3 for total in sums]
    assert logits.shape == (1, 30)


class Book:
    """A pool and a store of which every row is known: that of position p of text t holds t and p."""

    def __init__(self, width: int = 24) -> None:
        self.pool = PagePool(16, PAGE)
        self.store = FeatureStore(self.pool, torch.float32)

    def write(self, pages: PageList, count: int, rejected: int = 0) -> torch.Tensor:
        """`count` tokens and as many that are rolled back; returns the rows of the ones that stay."""
        assert self.pool.reserve(pages, count + rejected)
        at = torch.arange(pages.committed, pages.committed + count + rejected)
        slots = torch.tensor(pages.pages)[at // PAGE] * PAGE + at % PAGE
        hidden = [torch.randn(len(at), 64) for _ in self.store.taps]
        self.store.store(slots, hidden)
        self.pool.commit(pages, count, self.store.fingerprint)
        if not hidden:
            return torch.empty(count, 0)
        weights = self.store._weights
        assert weights is not None
        features = torch.cat(hidden, dim=1) @ weights.fc.T
        return torch.nn.functional.rms_norm(features, features.shape[1:], weights.norm, weights.eps)[:count]

    def rows(self, *spans: tuple[PageList, int, int]) -> list[torch.Tensor]:
        slices = self.store.read(spans)
        assert [(s.first, s.first + s.count) for s in slices] == [(first, last) for _, first, last in spans]
        return [torch.frombuffer(bytearray(s.data), dtype=s.dtype).view(s.count, s.width) for s in slices]


def test_rows_come_back_from_where_their_tokens_are() -> None:
    book = Book()
    book.store.use(projection(1))
    pages = [book.pool.open() for _ in range(3)]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for count in (3, 1, 4, 6):  # pages of the three texts lie between each other
        for index, it in enumerate(pages):
            parts[index].append(book.write(it, count, rejected=index))
    wanted = [torch.cat(rows) for rows in parts]
    spans = [(pages[1], 0, 14), (pages[0], 5, 6), (pages[2], 3, 9), (pages[0], 13, 14)]
    for got, right in zip(book.rows(*spans), [wanted[1], wanted[0][5:6], wanted[2][3:9], wanted[0][13:]], strict=True):
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
    assert book.store.read([]) == []


def test_each_page_is_marked_by_what_made_all_its_rows() -> None:
    book, a, b = Book(), projection(1), projection(2)
    pages = book.pool.open()
    book.write(pages, 5)
    for weights in (a, b, b, a):
        book.store.use(weights)
        book.write(pages, 4)
    # positions 0..4 nothing, 5..8 a, 9..16 b, 17..20 a
    marks = [book.pool.rows_of(page) for page in pages.pages]
    assert marks == ["", "", "", b.fingerprint, "", a.fingerprint]
    book.store.use(b)
    assert book.store.has(pages, 12, 16) and not book.store.has(pages, 11, 16) and not book.store.has(pages, 12, 17)
    assert book.store.has(pages, 4, 4)
    book.store.use(None)
    assert book.store.taps == () and book.store.fingerprint == ""
    book.write(pages, 4)
    assert [book.pool.rows_of(page) for page in pages.pages][-2:] == ["", ""]


def test_rows_of_another_width_take_the_place_of_all() -> None:
    """Back at the first weights, what they had made is gone, and no page says otherwise."""
    book, a, b = Book(), projection(1), projection(2, width=16)
    pages, names = book.pool.open(), [b"0", b"1"]
    book.store.use(a)
    book.write(pages, 8)
    book.pool.publish(pages, names)
    assert book.store.has(pages, 0, 8) and book.pool.find(names, a.fingerprint) == pages.pages
    book.store.use(b)
    book.store.use(a)
    assert not book.store.has(pages, 0, 8) and book.pool.find(names, a.fingerprint) == []
    assert book.pool.find(names) == pages.pages
    book.pool.check()


def test_a_page_of_another_life_is_marked_anew() -> None:
    book = Book()
    pages = book.pool.open()
    book.store.use(projection(1))
    book.write(pages, 4)
    (page,) = pages.pages
    book.pool.free(pages)
    book.store.use(None)
    again = book.pool.open()
    book.write(again, 2)
    assert again.pages == [page] and book.pool.rows_of(page) == ""


# How the weights come over


WEIGHTS = projection(3)


def pieces(size: int = 100, weights: ProjectionWeights = WEIGHTS) -> list[pb.FetchProjectionResponse]:
    """As a drafter sends them, in pieces of `size` bytes."""
    sent = []
    for name, tensor in (("fc.weight", weights.fc), ("hidden_norm.weight", weights.norm)):
        data = tensor.numpy().tobytes()
        for offset in range(0, len(data), size):
            piece = pb.FetchProjectionResponse(name=name, dtype=common_pb2.DTYPE_FLOAT32, shape=tensor.shape)
            piece.offset, piece.data = offset, data[offset : offset + size]
            sent.append(piece)
    return sent


class Stub:
    """A drafter's side of the call."""

    def __init__(self, sent: list[pb.FetchProjectionResponse]) -> None:
        self._sent = sent

    async def FetchProjection(self, request: Any, **options: Any) -> AsyncIterator[pb.FetchProjectionResponse]:
        for piece in self._sent:
            yield piece


def description(**changes: Any) -> common_pb2.Description:
    described = common_pb2.Description(
        taps=WEIGHTS.taps,
        feature_width=24,
        feature_norm_eps=WEIGHTS.eps,
        feature_fingerprint=WEIGHTS.fingerprint,
    )
    for name, value in changes.items():
        setattr(described, name, value)
    return described


@pytest.mark.parametrize("size", [64, 1000, 10**6])
async def test_weights_arrive_as_they_were_sent(size: int) -> None:
    got = await fetch(Stub(pieces(size)), description(), 64)  # type: ignore[arg-type]
    assert torch.equal(got.fc, WEIGHTS.fc) and torch.equal(got.norm, WEIGHTS.norm)
    assert (got.taps, got.eps) == (WEIGHTS.taps, WEIGHTS.eps)


def test_the_fingerprint_is_over_everything() -> None:
    parts = (f"{[0, 2]}{1e-6!r}".encode(), b"torch.float32[24, 128]", b"torch.float32[24]")
    data = parts[0] + parts[1] + WEIGHTS.fc.numpy().tobytes() + parts[2] + WEIGHTS.norm.numpy().tobytes()
    assert WEIGHTS.fingerprint == hashlib.sha256(data).hexdigest()[:32]


Spoil = Callable[[list[pb.FetchProjectionResponse]], object]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda sent: sent.pop(), "hidden_norm.weight has"),
        (lambda sent: sent.pop(3), "piece at 400, expected 300"),
        (lambda sent: sent.append(sent[0]), "piece at 0, expected"),
        (lambda sent: sent.clear(), "fc.weight has 0 bytes"),
        (lambda sent: setattr(sent[5], "name", "lm_head.weight"), "tensor lm_head.weight"),
        (lambda sent: setattr(sent[5], "dtype", common_pb2.DTYPE_BFLOAT16), "dtype 2"),
        (lambda sent: setattr(sent[0], "dtype", common_pb2.DTYPE_INT32), "dtype 4"),
        (lambda sent: sent[2].shape.append(1), r"shape \[24, 128, 1\], expected \[24, 128\]"),
        (lambda sent: setattr(sent[7], "data", bytes(100)), "has fingerprint"),
    ],
)
async def test_weights_that_are_not_what_was_described(spoil: Spoil, says: str) -> None:
    sent = pieces()
    spoil(sent)
    with pytest.raises(ConfigError, match=says):
        await fetch(Stub(sent), description(), 64)  # type: ignore[arg-type]


async def test_weights_for_another_target() -> None:
    """The fc of a drafter reads taps x hidden size."""
    with pytest.raises(ConfigError, match=r"shape \[24, 128\], expected \[24, 192\]"):
        await fetch(Stub(pieces()), description(), 96)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has fingerprint"):
        await fetch(Stub(pieces()), description(feature_norm_eps=1e-5), 64)  # type: ignore[arg-type]
