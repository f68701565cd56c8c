"""Muon against torch's own, and its orthogonal steps against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from training.muon import Muon, orthogonal

SHAPES = [(24, 40), (40, 24), (16, 16)]


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_steps_in_bfloat16_are_those_of_torch() -> None:
    ours, theirs = ([torch.nn.Parameter(m.clone()) for m in matrices(1)] for _ in range(2))
    mine = Muon([{"params": ours, "lr": 0.01}], torch.bfloat16)
    other = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for parameters, optimizer in ((ours, mine), (theirs, other)):
            for parameter, gradient in zip(parameters, matrices(10 + step), strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_steps_have_the_gradients_directions_and_like_lengths(dtype: torch.dtype, tolerance: float) -> None:
    """The iteration leaves singular vectors alone and brings all but tiny values into 0.68 to 1.14 (Jordan 2024)."""
    for matrix in matrices(2):
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ orthogonal(matrix, dtype).float() @ v.T
        diagonal = inside.diagonal()
        assert (inside - diagonal.diag()).abs().max() < tolerance
        assert diagonal.min() > 0.68 - tolerance and diagonal.max() < 1.14 + tolerance


def test_a_run_goes_on_from_what_it_saved() -> None:
    whole, first = ([torch.nn.Parameter(m.clone()) for m in matrices(3)] for _ in range(2))
    a, b = Muon(whole, torch.float32, lr=0.01), Muon(first, torch.float32, lr=0.01)
    for step in range(4):
        if step == 2:
            state = b.state_dict()
            b = Muon(first, torch.float32, lr=0.5)
            b.load_state_dict(state)
        for parameters, optimizer in ((whole, a), (first, b)):
            for parameter, gradient in zip(parameters, matrices(20 + step), strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(whole, first, strict=True))
    whole[0].grad = None  # a matrix without a gradient stays where it is
    before = whole[0].clone()
    a.step()
    assert torch.equal(before, whole[0])
