"""The decoder's blocks against transformers and float64: norm, linear layers, the whole target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from services.kernels.attention_plan import Layout
from services.model import linear
from services.model.linear import Linear
from services.model.norm import RMSNorm
from services.verifier.batch import Work, attention_for, plan
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import Target, resolve_dtype
from tests.support.prefill import prefill
from tests.support.tiny_llama import TinyLlama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, generator=generator).to(dtype)
    # From rows that eps dominates to large ones.
    x = torch.randn(6, 48, generator=generator) * torch.tensor([1e-6, 1e-3, 1.0, 30.0, 1e4, 0.0])[:, None]
    x = x.to(dtype)
    got = RMSNorm(weight, 1e-5)(x)
    assert got.dtype == dtype and got.shape == x.shape
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    step = 1e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(got.double(), exact, rtol=step, atol=1e-12)
    theirs = LlamaRMSNorm(48, 1e-5)
    theirs.weight.data = weight
    torch.testing.assert_close(got, theirs(x), rtol=2 * step, atol=1e-12)
    # Heads with weights of their own, out of a wider tensor.
    heads = torch.stack([weight, 2 * weight, -weight])
    wide_x = torch.randn(5, 4, 48, generator=generator).to(dtype)
    parts = [RMSNorm(heads[i], 1e-5)(wide_x[:, i].contiguous()) for i in range(3)]
    assert torch.equal(RMSNorm(heads, 1e-5)(wide_x[:, :3]), torch.stack(parts, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, residual, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 40), (24, 40), (rows, 24), (24,))
    )
    layer = Linear(weight, bias if biased else None)
    assert (layer.in_features, layer.out_features) == (40, 24)
    before = residual.clone()
    exact = x.double() @ weight.double().T + bias.double() * biased
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2.0**-7, "atol": 0.05}
    torch.testing.assert_close(layer(x).double(), exact, **tolerance)
    torch.testing.assert_close(layer.add_to(residual, x).double(), exact + residual.double(), **tolerance)
    assert torch.equal(residual, before) and layer(x).dtype == dtype


SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1, "num_hidden_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 24, "rms_norm_eps": 1e-2},
    "fast rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    llama = TinyLlama(tmp_path, seed=3, **SHAPES[shape])
    tokens = torch.randint(0, 330, (18,), generator=torch.Generator().manual_seed(4)).tolist()
    wanted = llama.logits(tokens)
    assert wanted.std() > 0.5
    torch.testing.assert_close(prefill(Target(tmp_path, "float32"), tokens), wanted, rtol=1e-4, atol=1e-4)
    rough = prefill(Target(tmp_path, "bfloat16"), tokens)
    assert rough.dtype == torch.bfloat16
    # Two layers of bfloat16 are good to a few percent of the logits' spread.
    assert (rough.float() - wanted).square().mean().sqrt() < 0.05 * wanted.std()


def test_linear_where_the_processor_packs_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs without AVX512BW, for which oneDNN refuses to lay weights out."""
    monkeypatch.setattr(linear, "_packs_bfloat16", lambda: False)
    x, weight, residual = (
        torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()
        for shape in ((9, 40), (24, 40), (9, 24))
    )
    layer = Linear(weight)
    exact = x.double() @ weight.double().T
    assert not layer.packed
    torch.testing.assert_close(layer(x).double(), exact, rtol=2.0**-7, atol=0.05)
    torch.testing.assert_close(layer.add_to(residual, x).double(), exact + residual.double(), rtol=2.0**-7, atol=0.1)


def test_native_attention_gives_the_same_logits(tmp_path: Path) -> None:
    """A prompt in two chunks, the second beside a decode row of another request, against whole prompts in float32."""
    llama = TinyLlama(tmp_path, seed=6, head_dim=32)
    target = Target(tmp_path, "bfloat16")
    target.prepare(64)
    kernel, layout = attention_for(target, num_pages=8, page_size=16)
    if kernel is None:
        pytest.skip("needs AVX512-BF16 and a C compiler")
    caches = allocate_caches(target.arch, 8, 16, target.dtype)
    a = torch.randint(0, 330, (40,), generator=torch.Generator().manual_seed(7)).tolist()
    b = torch.randint(0, 330, (10,), generator=torch.Generator().manual_seed(8)).tolist()
    rows = []
    for works in (
        [Work(a[:25], 0, 25, [6, 3, 1]), Work(b[:9], 0, 9, [2])],
        [Work(a[25:], 25, 15, [6, 3, 1]), Work(b[9:], 9, 1, [2])],
    ):
        batch, order = plan(works, layout)
        assert order == [0, 1]
        logits = target.forward(batch, caches, kernel).float()
        rows.append(logits.split([work.samples for work in works]))
    for tokens, parts in zip((a, b), zip(*rows, strict=True), strict=True):
        wanted = llama.logits(tokens)
        assert (torch.cat(parts) - wanted).square().mean().sqrt() < 0.05 * wanted.std()


def test_no_rows_wanted_no_logits(tiny_llama: TinyLlama) -> None:
    target = Target(tiny_llama.folder, "float32")
    target.prepare(8)
    layout = Layout(2, 4, target.arch.num_kv_heads, target.dtype)
    batch, _ = plan([Work([1, 2, 3], 0, 0, [1])], layout)
    assert target.forward(batch, allocate_caches(target.arch, 2, 4, target.dtype)).shape == (0, 330)


def test_dtype_names() -> None:
    assert resolve_dtype("float32") == torch.float32 and resolve_dtype("bfloat16") == torch.bfloat16
    assert resolve_dtype("auto") == resolve_dtype("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda")) == torch.float32
