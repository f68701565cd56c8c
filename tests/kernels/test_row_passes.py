"""Row-wise passes in C against float64: rounded once, strided rows, heads with weights of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.kernels import row_passes, row_passes_ref
from services.kernels.row_passes import rms_norm, rotate, silu_mul

CPU = torch.device("cpu")
ROUNDED = {"rtol": 2.0**-8, "atol": 1e-30}
"""One rounding to bfloat16, and float32 arithmetic before it."""

needs_native = pytest.mark.skipif(
    not row_passes.offered(torch.bfloat16, CPU, 16), reason="needs AVX512-BF16 and a C compiler"
)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@needs_native
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norm(rows: int) -> None:
    x, weight = numbers(rows, 80), numbers(80, seed=1).float()
    for scale in (1e-6, 1.0, 1e4, 0.0):
        torch.testing.assert_close(
            rms_norm(x * scale, weight, 1e-5).double(), exact_norm(x * scale, weight, 1e-5), **ROUNDED
        )


@needs_native
@pytest.mark.parametrize("shared", [False, True])
def test_norm_of_heads(shared: bool) -> None:
    """Some heads of a wider tensor, as the fused projection gives them."""
    wide = numbers(50, 7, 32)
    wide[:, 5:] = torch.nan
    weight = numbers(32, seed=1).float() if shared else numbers(5, 32, seed=1).float()
    got = rms_norm(wide[:, :5], weight, 1e-6)
    assert got.shape == (50, 5, 32) and got.is_contiguous()
    torch.testing.assert_close(got.double(), exact_norm(wide[:, :5], weight, 1e-6), **ROUNDED)


@needs_native
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("size", [32, 96])
def test_rotate(rows: int, size: int) -> None:
    """Complex numbers made of a head's halves, turned by the row's angles."""
    wide, angle = numbers(rows, 5, size), torch.rand(rows, 1, size // 2, generator=torch.Generator().manual_seed(1)) * 7
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    got = rotate(wide[:, :3], torch.cat([cos, cos], dim=-1), sin)
    assert got.shape == (rows, 3, size) and got.is_contiguous()
    halves = wide[:, :3].double().chunk(2, dim=-1)
    turned = torch.complex(*halves) * torch.complex(cos.double(), sin.double())
    wanted = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("size", [48, 40])
def test_silu_mul(rows: int, size: int) -> None:
    gate_up = numbers(rows, 2 * size) * 5
    wide = gate_up.double()
    wanted = wide[:, :size] * wide[:, :size].sigmoid() * wide[:, size:]
    # The reference, which takes the sizes that C does not, rounds twice.
    bound = ROUNDED if row_passes.offered(torch.bfloat16, CPU, size) else {"rtol": 2.0**-6, "atol": 1e-3}
    torch.testing.assert_close(silu_mul(gate_up).double(), wanted, **bound)
    single = row_passes_ref.silu_mul(gate_up.float())
    torch.testing.assert_close(single.double(), wanted, rtol=1e-5, atol=1e-6)


def test_silu_mul_keeps_its_range() -> None:
    gate = torch.tensor([-300.0, -90.0, -1.0, 0.0, 1.0, 90.0, 3e38, -3e38] * 2).bfloat16()
    got = silu_mul(torch.cat([gate, torch.ones(16).bfloat16()])[None])[0, :8].tolist()
    assert got[3] == 0 and got[5] == 90 and got[6] == gate[6] and got[7] == 0
    assert abs(got[0]) < 1e-30 and abs(got[1]) < 1e-30
    assert got[2] == pytest.approx(-0.2689, rel=4e-3) and got[4] == pytest.approx(0.7311, rel=4e-3)


def test_what_is_not_offered() -> None:
    assert not row_passes.offered(torch.float32, CPU, 64)
    assert not row_passes.offered(torch.bfloat16, torch.device("meta"), 64)
    assert not row_passes.offered(torch.bfloat16, CPU, 40)
