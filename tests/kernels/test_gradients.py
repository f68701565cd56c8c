"""Training passes, in C and in plain torch, against formulas of their own that autograd differentiates in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.kernels import gradients, gradients_ref, row_passes

CPU = torch.device("cpu")
EPS = 1e-5

needs_native = pytest.mark.skipif(
    not row_passes.offered(torch.bfloat16, CPU, 16), reason="needs AVX512-BF16 and a C compiler"
)


@pytest.fixture(params=[1, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Parts of what threads sum on their own must come together."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Float32 that bfloat16 holds exactly."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def exact_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up[:, : gate_up.shape[1] // 2], gate_up[:, gate_up.shape[1] // 2 :]
    return gate / (1 + (-gate).exp()) * up


def exact_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Complex numbers made of a head's halves, turned by the row's angles."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos[:, :half], sin)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def exact_convolve(z: Tensor, base: Tensor, dynamic: Tensor, slots: int) -> Tensor:
    """Row by row: sum over taps i of (base[i] + dynamic[row, i], stretched over groups) * z[row - i]."""
    stretched = dynamic.repeat_interleave(z.shape[1] // dynamic.shape[-1], dim=-1)
    rows = []
    for row in range(len(z)):
        taps = range(min(len(base), row % slots + 1))
        rows.append(torch.stack([(base[i] + stretched[row, i]) * z[row - i] for i in taps]).sum(0))
    return torch.stack(rows)


def exact_block_softmax(far: Tensor, near: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row, over the far keys that its block sees and all near ones."""
    (batch, heads, rows, _), slots = far.shape, near.shape[-1]
    p_far, p_near = torch.zeros_like(far), torch.zeros_like(near)
    for b in range(batch):
        for row in range(rows):
            end = int(seen[b, row // slots])
            for head in range(heads):
                p = torch.softmax(torch.cat([far[b, head, row, :end], near[b, head, row]]), dim=-1)
                p_far[b, head, row, :end], p_near[b, head, row] = p[:end], p[end:]
    return p_far, p_near


@dataclass(frozen=True)
class Pass:
    """One pass: ours, the formula, what it takes (tensors that are differentiated, then others)."""

    ours: Callable[..., Tensor | tuple[Tensor, ...]]
    exact: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    others: tuple[Tensor | int | float, ...] = ()
    exact_others: tuple[Tensor | int, ...] = ()
    wide: tuple[int, ...] = ()
    """Inputs that stay float32."""


def turns(rows: int, size: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, size // 2, generator=torch.Generator().manual_seed(5)) * 7
    cos, sin = (x.bfloat16().float() for x in (angle.cos(), angle.sin()))
    return torch.cat([cos, cos], dim=-1), sin


def passes(dtype: torch.dtype) -> dict[str, Pass]:
    cos, sin = turns(7, 64)
    seen = torch.tensor([[0, 5, 16], [31, 32, 48]])
    far, near = numbers(2, 3, 3 * 7, 48, scale=2), numbers(2, 3, 3 * 7, 7, seed=1, scale=2)
    for b in range(2):
        for n in range(3):
            far[b, :, n * 7 : n * 7 + 7, seen[b, n] :] = 1e30  # what is not seen may be anything
    # Scores whose exponential float32 does not hold: of a key in a register seen in part, in whole, and of a near one.
    far[1, :, 0, 30] = far[1, :, 1, 3] = near[1, :, 2, 6] = 150
    base = numbers(2, 96, seed=1), numbers(3, 64, seed=1)
    return {
        "norm": Pass(
            lambda x, w: gradients.rms_norm(x, w, EPS), exact_norm, (numbers(37, 80), numbers(80, seed=1)), wide=(1,)
        ),
        "norm of small numbers": Pass(
            lambda x, w: gradients.rms_norm(x, w, EPS),
            exact_norm,
            (numbers(5, 32, scale=2.0**-8), numbers(32, seed=1)),
            wide=(1,),
        ),
        "silu_mul": Pass(gradients.silu_mul, exact_silu_mul, (numbers(37, 96, scale=3),)),
        "rotate": Pass(
            gradients.rotate,
            exact_rotate,
            (numbers(7, 3, 64),),
            (cos.to(dtype), sin.to(dtype)),
            (cos.double(), sin.double()),
        ),
        "convolve": Pass(
            gradients.convolve, exact_convolve, (numbers(40, 96), base[0], numbers(40, 2, 6, seed=2)), (8,), (8,)
        ),
        "convolve with 3 taps over blocks of 2": Pass(
            gradients.convolve, exact_convolve, (numbers(10, 64), base[1], numbers(10, 3, 2, seed=2)), (2,), (2,)
        ),
        "block_softmax": Pass(gradients.block_softmax, exact_block_softmax, (far, near), (seen,), (seen,)),
    }


def run(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor], others: tuple[object, ...]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients, in float64, of made-up gradients by the results."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = function(*leaves, *others)
    outs = (outs,) if isinstance(outs, Tensor) else outs
    by = [numbers(*out.shape, seed=9 + i).to(out.dtype) for i, out in enumerate(outs)]
    found = torch.autograd.grad(list(outs), leaves, by)
    return [out.detach().double() for out in outs], [grad.double() for grad in found]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_native)])
@pytest.mark.parametrize("name", passes(torch.float32))
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    case = passes(dtype)[name]
    inputs = [x if i in case.wide else x.to(dtype) for i, x in enumerate(case.inputs)]
    got, grads = run(case.ours, inputs, case.others)
    wanted, wanted_grads = run(case.exact, [x.double() for x in case.inputs], case.exact_others)
    rounded = {"rtol": 2.0**-8, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, **rounded)
    if dtype == torch.bfloat16:  # what is summed in float32 cancels, and softmax is differentiated by rounded results
        rounded["atol"] = 2e-3 if name == "block_softmax" else 1e-5
    else:
        rounded["atol"] = 2e-5
    for mine, other in zip(grads, wanted_grads, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(mine, other, rtol=rounded["rtol"], atol=rounded["atol"] * max(scale, 1.0))


@needs_native
def test_softmax_gradient_of_its_own_results() -> None:
    """Given what was rounded, the gradient is p * (by - sum(p * by)), rounded once."""
    case = passes(torch.bfloat16)["block_softmax"]
    (far, near), (by_far, by_near) = run(case.ours, [x.bfloat16() for x in case.inputs], case.others)
    p = torch.cat([far, near], dim=-1)
    by = torch.cat([numbers(*far.shape, seed=9), numbers(*near.shape, seed=10)], dim=-1).double()
    wanted = p * (by - (p * by).sum(-1, keepdim=True))
    torch.testing.assert_close(torch.cat([by_far, by_near], dim=-1), wanted, rtol=2.0**-8, atol=1e-7)
    assert not far[0, :, :7].any() and not by_far[0, :, :7].any()  # of the block that sees no far key


@needs_native
def test_layouts() -> None:
    """Weights as the projection gives them, heads cut out of a wider tensor, a gradient that is one number."""
    both = numbers(16, 2, 2, 4).bfloat16()
    z, base = numbers(16, 64, seed=1).bfloat16(), numbers(2, 64, seed=2).bfloat16()
    wide = numbers(16, 7, 32).bfloat16()
    cos, sin = (x.bfloat16() for x in turns(16, 32))
    for strided, call in (
        (both[:, 1], lambda x: gradients.convolve(z, base, x, 8)),
        (wide[:, 2:5], lambda x: gradients.rotate(x, cos, sin)),
        (wide[:, 2:5], lambda x: gradients.rms_norm(x.reshape(-1, 32), torch.ones(32), EPS)),
    ):
        found = []
        for x in (strided, strided.clone(memory_format=torch.contiguous_format)):
            leaf = x.detach().requires_grad_()
            call(leaf).sum().backward()
            assert leaf.grad is not None
            found.append(leaf.grad)
        assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_native)])
def test_cross_entropy_slope(dtype: torch.dtype) -> None:
    """Of -sum(mass * log softmax(logits)[ids]); an id may stand in a row twice, and rows may weigh nothing."""
    logits = numbers(9, 96, scale=3).to(dtype)
    ids = torch.randint(96, (9, 5), generator=torch.Generator().manual_seed(1))
    ids[0, 1] = ids[0, 0]
    mass = torch.rand(9, 5, generator=torch.Generator().manual_seed(2))
    mass[3] = 0
    leaf = logits.double().requires_grad_()
    (-(mass * torch.log_softmax(leaf, -1).gather(1, ids))).sum().backward()
    total = logits.float().logsumexp(-1)
    got = gradients.cross_entropy_slope(logits.clone(), total, ids, mass).double()
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    assert leaf.grad is not None
    torch.testing.assert_close(got, leaf.grad, rtol=tolerance, atol=tolerance)
    assert not got[3].any()


def test_what_c_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that fill no register, blocks longer than one, other types: the references."""
    called: list[str] = []
    for name in ("rms_norm", "silu_mul", "rotate", "convolve", "block_softmax", "cross_entropy_slope"):
        monkeypatch.setattr(gradients_ref, name, lambda *_, name=name: called.append(name))
    x = torch.zeros(8, 40).bfloat16()
    gradients.rms_norm(x, torch.ones(40), EPS)
    gradients.silu_mul(torch.zeros(8, 80).bfloat16())
    gradients.rotate(torch.zeros(8, 2, 48).bfloat16(), x, x)
    gradients.convolve(torch.zeros(8, 64).bfloat16(), x, torch.zeros(8, 2, 8).bfloat16(), 8)
    gradients.block_softmax(torch.zeros(1, 1, 8, 40).bfloat16(), x, x)
    gradients.block_softmax(torch.zeros(1, 1, 34, 48).bfloat16(), torch.zeros(1, 1, 34, 17).bfloat16(), x)
    gradients.cross_entropy_slope(x, x, x, x)
    gradients.rms_norm(torch.zeros(8, 64), torch.ones(64), EPS)
    assert called == [
        *("rms_norm", "silu_mul", "rotate", "convolve", "block_softmax", "block_softmax"),
        *("cross_entropy_slope", "rms_norm"),
    ]
