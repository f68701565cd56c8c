"""The block-local convolution against its formula, term by term in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.kernels import local_convolution as module
from services.kernels.local_convolution import LocalConvolution
from services.kernels.local_convolution_ref import local_convolution

CPU = torch.device("cpu")


def naive(z: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
    """C(z, b, d)[j, c] = sum over i of (b[i, c] + d[j, i, c // g]) * z[j - i, c] of one block, z[< 0] = 0."""
    slots, hidden = z.shape
    group = hidden // dynamic.shape[-1]
    out = torch.zeros_like(z)
    for j in range(slots):
        for i in range(min(len(base), j + 1)):
            for c in range(hidden):
                out[j, c] += (base[i, c] + dynamic[j, i, c // group]) * z[j - i, c]
    return out


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_reference(taps: int, slots: int) -> None:
    z, base, dynamic = numbers(3, slots, 12), numbers(taps, 12, seed=1), numbers(3, slots, taps, 4, seed=2)
    got = local_convolution(z, base, dynamic)
    wanted = [naive(z[r].double(), base.double(), dynamic[r].double()) for r in range(3)]
    torch.testing.assert_close(got.double(), torch.stack(wanted), rtol=1e-6, atol=1e-6)


def test_by_hand() -> None:
    """Two taps, two groups of one channel: slot 1 takes its own row and the anchor's, each by its weight."""
    z = torch.tensor([[[1.0, 10.0], [2.0, 20.0]]])
    base = torch.tensor([[1.0, 1.0], [0.5, 0.0]])
    dynamic = torch.tensor([[[[0.0, 1.0], [9.0, 9.0]], [[1.0, 0.0], [0.5, 2.0]]]])
    # Slot 0: (1+0)*1, (1+1)*10; its second tap would read before the block. Slot 1: 2*2 + 1*1, 1*20 + 2*10.
    assert local_convolution(z, base, dynamic).tolist() == [[[1.0, 20.0], [5.0, 40.0]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("taps", "group"), [(2, 16), (3, 32), (2, 4)])
@pytest.mark.parametrize(("rows", "slots"), [(8, 8), (40, 8), (35, 7), (5, 1), (44, 8)])
def test_batches(dtype: torch.dtype, taps: int, group: int, rows: int, slots: int) -> None:
    """Blocks one after the other see nothing of each other; rows that fill no block only need to be finite."""
    hidden = 64
    z, residual, base = numbers(rows, hidden, dtype=dtype), numbers(rows, hidden, dtype=dtype), numbers(taps, hidden)
    # Weights as the projection gives them: two sides, of which one is used.
    both = numbers(rows, 2, taps, hidden // group, dtype=dtype, seed=3)
    base = base.to(dtype)
    convolution = LocalConvolution(dtype, CPU, taps, group)
    for side in (0, 1):
        plain = convolution(z, slots, base, both[:, side])
        added = convolution(z, slots, base, both[:, side], residual=residual)
        assert plain.dtype == dtype and torch.isfinite(plain).all() and torch.isfinite(added).all()
        for first in range(0, rows - slots + 1, slots):
            part = slice(first, first + slots)
            wanted = naive(z[part].double(), base.double(), both[part, side].double())
            tolerance = 1e-6 if dtype == torch.float32 else 4e-2  # the reference rounds every term
            torch.testing.assert_close(plain[part].double(), wanted, rtol=tolerance, atol=tolerance)
            wanted += residual[part].double()
            torch.testing.assert_close(added[part].double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(
    LocalConvolution(torch.bfloat16, CPU, 2, 16).native is False, reason="needs AVX512-BF16 and a C compiler"
)
def test_native_is_rounded_once() -> None:
    """Within half a unit in the last place of the exact sum, where the reference rounds every term."""
    z, base, dynamic = (numbers(*shape, dtype=torch.bfloat16) for shape in ((16, 64), (2, 64), (16, 2, 4)))
    got = LocalConvolution(torch.bfloat16, CPU, 2, 16)(z, 8, base, dynamic)
    wanted = torch.cat([naive(z[i : i + 8].double(), base.double(), dynamic[i : i + 8].double()) for i in (0, 8)])
    torch.testing.assert_close(got.double(), wanted, rtol=2.0**-8, atol=1e-6)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.native, "load", lambda name, **defines: None)
    convolution = LocalConvolution(torch.bfloat16, CPU, 2, 16)
    assert not convolution.native
    z, base, dynamic = (numbers(*shape, dtype=torch.bfloat16) for shape in ((8, 32), (2, 32), (8, 2, 2)))
    assert torch.equal(convolution(z, 8, base, dynamic), local_convolution(z[None], base, dynamic[None])[0])
