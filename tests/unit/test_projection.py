"""Feature rows: the formula, the same row in any company, and a fingerprint that sees everything that changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.model.projection import Projection, ProjectionWeights

TAPS, TARGET, H = 3, 24, 16


@pytest.fixture
def weights() -> ProjectionWeights:
    torch.manual_seed(3)
    return ProjectionWeights(taps=(0, 2, 5), fc=torch.randn(H, TAPS * TARGET), norm=1 + 0.1 * torch.randn(H), eps=1e-5)


def hidden(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, TARGET) for _ in range(TAPS)]


def test_formula(weights: ProjectionWeights) -> None:
    """In float64: hidden_norm(fc(taps side by side, in their order))."""
    taps = hidden(7)
    x = torch.cat(taps, dim=1).double() @ weights.fc.double().T
    wanted = x / (x.pow(2).mean(1, keepdim=True) + weights.eps).sqrt() * weights.norm.double()
    got = Projection(weights, torch.float32)(taps)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(Projection(weights, torch.float32)(taps[::-1]).double(), wanted, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 8, 9, 31])
def test_reduced_precision_of_any_number_of_rows(weights: ProjectionWeights, rows: int) -> None:
    taps = hidden(rows)
    got = Projection(weights, torch.bfloat16)([tap.bfloat16() for tap in taps])
    assert got.dtype == torch.bfloat16 and tuple(got.shape) == (rows, H)
    torch.testing.assert_close(got.float(), Projection(weights, torch.float32)(taps), atol=0.08, rtol=0.05)


def test_fingerprint(weights: ProjectionWeights) -> None:
    first = weights.fingerprint
    assert len(first) == 32 and replace(weights, fc=weights.fc.clone()).fingerprint == first
    assert replace(weights, fc=weights.fc.T.contiguous().T).fingerprint == first  # of values, not of their layout
    last = weights.fc.clone()
    last[-1, -1] += 1e-6 * last[-1, -1].abs() + 1e-6
    others = [
        replace(weights, taps=(0, 2, 4)),
        replace(weights, eps=1e-6),
        replace(weights, fc=last),
        replace(weights, fc=weights.fc.bfloat16()),
        replace(weights, fc=weights.fc.view(2 * H, -1)),
        replace(weights, norm=weights.norm + 1e-3),
    ]
    assert len({first, *(other.fingerprint for other in others)}) == 1 + len(others)
