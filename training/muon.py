"""Muon (Jordan 2024), as torch.optim.Muon but in a type of one's choice.

torch's own computes in bfloat16 whatever it is given: on a CPU that does not multiply it that took four fifths of a
step of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
_STEPS = 5
_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonal matrices, with Nesterov's correction and without weight decay.

    A matrix moves by lr * 0.2 * sqrt(its longer side) at most along each of its singular directions, so that an entry
    moves as far as under AdamW at the same rate (Moonlight, arXiv 2502.16982, section 2.2).
    """

    def __init__(self, params: Iterable[Any], dtype: torch.dtype, lr: float = 1e-3, momentum: float = 0.95) -> None:
        """params: matrices, or groups of them. dtype: in which steps are made orthogonal."""
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._dtype = dtype

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step by the gradients that are there; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                update = orthogonal(gradient.lerp(buffer, momentum), self._dtype)
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)
        return None


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """`matrix` [a, b] with singular values of about 1 (0.7 to 1.2), by Newton-Schulz steps in `dtype`."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
