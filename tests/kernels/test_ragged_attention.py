"""Ragged paged attention against one naive float64 attention per request and head."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from services.kernels import attention_plan
from services.kernels.attention_plan import Layout, plan_attention
from services.kernels.ragged_attention import BLOCK, RaggedAttention
from services.kernels.ragged_attention_ref import ragged_attention


@dataclass
class Piece:
    """One request's part of a step."""

    rows: int
    start: int
    pages: list[int]


@dataclass
class Case:
    """Requests as (rows of this step, tokens before it), over a pool of pages in random order."""

    requests: list[tuple[int, int]]
    page_size: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    native: bool = False
    causal: bool = True
    window: int = 0


def naive(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [n, Hq, d], k and v [L, Hkv, d] in float64; row i of q is position L - n + i. [n, Hq * d]."""
    rows, heads, d = q.shape
    out = torch.empty_like(q)
    for i in range(rows):
        position = len(k) - rows + i
        seen = [
            key
            for key in range(len(k))
            if (key <= position or not case.causal) and (abs(key - position) < case.window or not case.window)
        ]
        for head in range(heads):
            mine = head * k.shape[1] // heads
            scores = k[seen, mine] @ q[i, head] / d**0.5
            out[i, head] = torch.softmax(scores, 0) @ v[seen, mine]
    return out.reshape(rows, heads * d)


def run(case: Case, seed: int = 0, poison: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the kernel gives, what it should give), rows in the step's order. `poison` fills unused cache cells."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    page, hkv, d = case.page_size, case.kv_heads, case.head_dim
    counts = [-(-(rows + before) // page) for rows, before in case.requests]
    free = rng.sample(range(sum(counts) + 3), sum(counts))
    layout = Layout(sum(counts) + 3, page, hkv, case.dtype, native=case.native)
    cache = torch.full((2, hkv, layout.num_pages, page, d), poison, dtype=case.dtype)
    works, contents = [], []
    for (rows, before), count in zip(case.requests, counts, strict=True):
        pages = [free.pop() for _ in range(count)]
        k, v = (torch.randn(rows + before, hkv, d, generator=noise).to(case.dtype) for _ in range(2))
        for position in range(rows + before):
            cell = pages[position // page], position % page
            cache[0, :, cell[0], cell[1]], cache[1, :, cell[0], cell[1]] = k[position], v[position]
        works.append(Piece(rows, before, pages))
        contents.append((k.double(), v.double()))
    planned = plan_attention(works, layout, case.causal, case.window)
    queries = [torch.randn(rows, case.heads, d, generator=noise).to(case.dtype) for rows, _ in case.requests]
    flat = cache.view(2 * hkv * layout.num_pages, page * d)
    together = torch.cat([queries[i] for i in planned.order])
    if case.native:
        kernel = RaggedAttention.find(case.dtype, layout.num_pages, page, hkv, d)
        assert kernel is not None and planned.blocks is not None
        # Rows of a wider tensor, as the target's fused projection gives them.
        wide = torch.cat([together, torch.full_like(together[:, :hkv], torch.nan)], dim=1)
        got = kernel(wide[:, : case.heads], flat, planned.blocks)
    else:
        got = ragged_attention(together, flat, planned.groups, hkv, d)
    wanted = torch.cat([naive(case, queries[i].double(), *contents[i]) for i in planned.order])
    return got, wanted


def check(case: Case, seed: int = 0) -> None:
    got, wanted = run(case, seed)
    assert got.dtype == case.dtype and got.shape == wanted.shape
    tolerance = 2e-6 if case.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


MIXES = {
    "one row": [(1, 0)],
    "one context": [(1, 37)],
    "prefill": [(29, 0)],
    "second chunk": [(16, 13)],
    "equal decodes": [(1, 20)] * 5,
    "unequal decodes": [(1, n) for n in (0, 1, 15, 16, 17, 63)],
    "verify": [(4, 20), (8, 33), (1, 5), (3, 0)],
    "all at once": [(1, 40), (8, 3), (30, 0), (1, 0), (17, 15), (5, 5)],
    "last cell of a page": [(4, 12), (1, 31), (16, 0)],
}


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_equals_naive_attention(mix: str, page_size: int) -> None:
    check(Case(MIXES[mix], page_size))


VIEWS = [(causal, window) for causal in (True, False) for window in (0, 1, 2, 16, 17, 40)]


@pytest.mark.parametrize(("causal", "window"), VIEWS)
@pytest.mark.parametrize("mix", ["prefill", "verify", "all at once", "last cell of a page"])
def test_views(mix: str, causal: bool, window: int) -> None:
    for page_size in (3, 16):
        check(Case(MIXES[mix], page_size, causal=causal, window=window))


@pytest.mark.parametrize("mix", ["verify", "all at once"])
def test_nothing_outside_a_view_is_seen(mix: str) -> None:
    for causal, window in VIEWS:
        clean, _ = run(Case(MIXES[mix], 4, causal=causal, window=window))
        dirty, _ = run(Case(MIXES[mix], 4, causal=causal, window=window), poison=1e6)
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 1), (9, 3)])
def test_head_sharing(heads: int, kv_heads: int) -> None:
    check(Case(MIXES["all at once"], 4, heads=heads, kv_heads=kv_heads, head_dim=16))


def test_bfloat16() -> None:
    check(Case(MIXES["all at once"], 16, head_dim=32, dtype=torch.bfloat16))


@pytest.mark.parametrize("cost", [0, 100, 10**9], ids=["apart", "some", "together"])
def test_grouping_never_changes_the_result(cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_GROUP_COST", cost)
    rng = random.Random(cost)
    for seed in range(6):
        check(Case([(rng.randint(1, 9), rng.randint(0, 50)) for _ in range(7)], rng.choice([2, 8])), seed)


def test_long_contexts_form_groups_of_their_own() -> None:
    requests = [(1, 3000), (1, 2500), (1, 8), (8, 20), (1, 4), (40, 700)]
    layout = Layout(1000, 16, 2, torch.float32)
    pieces = [Piece(rows, before, list(range(-(-(rows + before) // 16)))) for rows, before in requests]
    assert len(plan_attention(pieces, layout).groups) > 1
    check(Case(requests, 16))


def test_nothing_outside_a_request_is_seen() -> None:
    """Finite rubbish in every cell that holds no token of the request leaves no trace."""
    for mix in MIXES.values():
        clean, _ = run(Case(mix, 4))
        dirty, _ = run(Case(mix, 4), poison=1e6)
        assert torch.equal(clean, dirty)


DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(RaggedAttention.find(dtype, 4, 16, 2, 32) is None, reason=f"needs {needed}"),
        id=str(dtype).removeprefix("torch."),
    )
    for dtype, needed in (
        (torch.float32, "a C compiler"),
        (torch.bfloat16, "AVX512-BF16 and a C compiler"),
    )
]
native = pytest.mark.parametrize("dtype", DTYPES)


@native
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("page_size", "heads", "kv_heads", "head_dim"),
    # Default model; odd pages; then the head sizes and sharing of Qwen2 0.5B, Qwen3, Phi-like 96 and wide 256.
    [
        (16, 9, 3, 64),
        (32, 4, 4, 32),
        (48, 8, 1, 128),
        (16, 14, 2, 64),
        (16, 16, 8, 128),
        (16, 4, 2, 96),
        (16, 2, 1, 256),
    ],
)
def test_native(mix: str, page_size: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        check(Case(MIXES[mix], page_size, heads, kv_heads, head_dim, dtype, native=True), seed)


@native
@pytest.mark.parametrize(("causal", "window"), VIEWS)
@pytest.mark.parametrize("mix", ["prefill", "verify", "all at once", "long"])
def test_native_views(mix: str, causal: bool, window: int, dtype: torch.dtype) -> None:
    """Chunks longer than a block too: rows of a non-causal block see keys of the blocks after theirs."""
    requests = {**MIXES, "long": [(2 * BLOCK + 3, 70), (BLOCK, 300), (8, 1000)]}[mix]
    check(Case(requests, 16, 6, 2, 64, dtype, native=True, causal=causal, window=window))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("mix", MIXES)
def test_native_without_tiles(mix: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors that have AVX512-BF16 and no AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    for causal, window in ((True, 0), (False, 17)):
        check(Case(MIXES[mix], 16, 9, 3, 64, dtype, native=True, causal=causal, window=window))


@native
def test_native_cuts_long_chunks_into_blocks(dtype: torch.dtype) -> None:
    mix = [(BLOCK, 0), (BLOCK + 1, 3), (4 * BLOCK + 5, 200), (1, 0)]
    check(Case(mix, 16, 6, 2, 64, dtype, native=True))


@native
def test_native_never_shows_stale_cells(dtype: torch.dtype) -> None:
    clean, _ = run(Case([(3, 30), (1, 7)], 16, 4, 2, 32, dtype, native=True))
    stale, _ = run(Case([(3, 30), (1, 7)], 16, 4, 2, 32, dtype, native=True), poison=1e4)
    torch.testing.assert_close(clean, stale, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[:1])
@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_native_with_any_pages_in_float32(page_size: int, dtype: torch.dtype) -> None:
    for mix in MIXES.values():
        check(Case(mix, page_size, 6, 2, 64, dtype, native=True))


@pytest.mark.parametrize("dtype", DTYPES[:1])
def test_native_gives_a_row_whatever_is_beside_it(dtype: torch.dtype) -> None:
    """In float32 to the last bit: verified in one block, or one by one."""
    kernel = RaggedAttention.find(dtype, 12, 16, 3, 64)
    assert kernel is not None
    noise = torch.Generator().manual_seed(1)
    cache, q = torch.randn(72, 1024, generator=noise), torch.randn(8, 9, 64, generator=noise)
    layout = Layout(12, 16, 3, dtype, native=True)
    whole = plan_attention([Piece(8, 100, list(range(7)))], layout).blocks
    assert whole is not None
    wanted = kernel(q, cache, whole)
    for row in range(8):
        one = plan_attention([Piece(1, 100 + row, list(range(7)))], layout).blocks
        assert one is not None
        assert torch.equal(kernel(q[row : row + 1], cache, one)[0], wanted[row])


@native
def test_native_softmax_keeps_its_range(dtype: torch.dtype) -> None:
    """Scores far apart: one key takes all, and nothing overflows."""
    kernel = RaggedAttention.find(dtype, 1, 16, 1, 32)
    assert kernel is not None
    cache = torch.zeros(2, 16, 32, dtype=dtype)
    cache[0, :, 0] = torch.arange(16) * 50.0  # keys
    cache[1] = torch.arange(16)[:, None].to(dtype)  # values
    blocks = plan_attention([Piece(1, 15, [0])], Layout(1, 16, 1, dtype, native=True)).blocks
    assert blocks is not None
    q = torch.zeros(1, 1, 32, dtype=dtype)
    for sign, best in ((100.0, 15.0), (-100.0, 0.0)):
        q[0, 0, 0] = sign
        got = kernel(q, cache.view(2, -1), blocks)
        torch.testing.assert_close(got, torch.full((1, 32), best, dtype=dtype), rtol=0, atol=1e-30)


@pytest.mark.parametrize(
    ("dtype", "page_size", "head_dim"),
    [(torch.float16, 16, 64), (torch.bfloat16, 8, 64), (torch.bfloat16, 16, 40), (torch.float32, 16, 40)],
    ids=["dtype", "page size", "head size", "head size, float32"],
)
def test_native_is_not_offered_where_it_cannot_run(dtype: torch.dtype, page_size: int, head_dim: int) -> None:
    assert RaggedAttention.find(dtype, 4, page_size, 2, head_dim) is None
