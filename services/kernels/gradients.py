"""Passes of a drafter's training between its matrix products: in C for bfloat16 on CPUs with AVX512-BF16.

Elsewhere the references in gradients_ref run. torch's own, one operation after the other, take most of a step's time.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from services.kernels import gradients_ref as reference
from services.kernels import native, row_passes
from services.kernels.local_convolution import LocalConvolution

_SLOTS = 16  # most of a block in `block_softmax`


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference."""
    if not _offered(x, x.shape[-1]):
        return reference.rms_norm(x, weight, eps)
    out: Tensor = _Norm.apply(x, weight, eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """As the reference."""
    if not _offered(gate_up, gate_up.shape[-1] // 2):
        return reference.silu_mul(gate_up)
    out: Tensor = _SiluMul.apply(gate_up)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As the reference."""
    if not _offered(x, x.shape[-1] // 2):
        return reference.rotate(x, cos, sin)
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def convolve(z: Tensor, base: Tensor, dynamic: Tensor, slots: int) -> Tensor:
    """As the reference."""
    if not _offered(z, z.shape[1] // dynamic.shape[-1]):
        return reference.convolve(z, base, dynamic, slots)
    out: Tensor = _Convolve.apply(z, base, dynamic, slots)
    return out


def block_softmax(far: Tensor, near: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    if not _offered(far, far.shape[-1]) or near.shape[-1] > _SLOTS:
        return reference.block_softmax(far, near, seen)
    both: tuple[Tensor, Tensor] = _BlockSoftmax.apply(far, near, seen)
    return both


def cross_entropy_slope(logits: Tensor, total: Tensor, ids: Tensor, mass: Tensor) -> Tensor:
    """As the reference."""
    if not _offered(logits, logits.shape[1]):
        return reference.cross_entropy_slope(logits, total, ids, mass)
    ids, mass = ids.contiguous(), mass.contiguous()
    _call("cross_entropy_slope", logits, total, mass.sum(-1), ids, mass, *logits.shape, ids.shape[1])
    return logits


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return row_passes.rms_norm(x, weight.detach(), eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (by,), (x, weight) = grads, ctx.saved_tensors
        out, sums = torch.empty_like(x), torch.zeros(torch.get_num_threads(), x.shape[1])
        _call("rms_norm_gradient", x, weight.detach(), ctx.eps, by.contiguous(), out, sums, *x.shape)
        return out, sums.sum(0), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return row_passes.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (by,), (gate_up,) = grads, ctx.saved_tensors
        out = torch.empty_like(gate_up)
        _call("silu_mul_gradient", gate_up, by.contiguous(), out, *by.shape)
        return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return row_passes.rotate(x.contiguous(), cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (by,), (cos, sin) = grads, ctx.saved_tensors
        return row_passes.rotate(by.contiguous(), cos, -sin), None, None


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, base: Tensor, dynamic: Tensor, slots: int) -> Tensor:
        z, base = z.contiguous(), base.contiguous()
        ctx.save_for_backward(z, base, dynamic)
        ctx.slots = slots
        taps, group = len(base), z.shape[1] // dynamic.shape[-1]
        return _convolution(taps, group)(z, slots, base, dynamic)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (by,), (z, base, dynamic) = grads, ctx.saved_tensors
        (n, hidden), (taps, groups) = z.shape, dynamic.shape[1:]
        dz, sums = torch.empty_like(z), torch.zeros(torch.get_num_threads(), taps, hidden)
        ddynamic = torch.empty((n, taps, groups), dtype=z.dtype)
        sizes = n, hidden, hidden // groups, taps, ctx.slots
        _call("convolution_gradient", z, base, dynamic, dynamic.stride(0), by.contiguous(), dz, ddynamic, sums, *sizes)
        return dz, sums.sum(0).to(base.dtype), ddynamic, None


class _BlockSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, far: Tensor, near: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        far, near, seen = far.contiguous(), near.contiguous(), seen.contiguous()
        outs = torch.empty_like(far), torch.empty_like(near)
        batch, heads, _, keys = far.shape
        _call("block_softmax", far, near, seen, *outs, batch, heads, seen.shape[1], near.shape[-1], keys)
        ctx.save_for_backward(*outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        far, near = ctx.saved_tensors
        by_far, by_near = (by.clone(memory_format=torch.contiguous_format) for by in grads)
        rows, slots, keys = near.shape[:3].numel(), near.shape[-1], far.shape[-1]
        _call("block_softmax_gradient", far, near, by_far, by_near, rows, slots, keys)
        return by_far, by_near, None


def _offered(x: Tensor, size: int) -> bool:
    """Whether C passes take `x`, in rows of `size`."""
    return row_passes.offered(x.dtype, x.device, size) and _library() is not None


@functools.cache
def _convolution(taps: int, group: int) -> LocalConvolution:
    return LocalConvolution(torch.bfloat16, torch.device("cpu"), taps, group)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return native.load("gradients") if torch.cpu._is_avx512_bf16_supported() else None


def _call(name: str, *arguments: Tensor | int | float) -> None:
    """Calls a pass with addresses, 64-bit whole numbers, 32-bit floats, and the number of threads."""
    library = _library()
    assert library is not None
    kinds: dict[type, Any] = {int: ctypes.c_int64, float: ctypes.c_float}
    converted: list[Any] = [
        ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else kinds[type(a)](a) for a in arguments
    ]
    getattr(library, name)(*converted, ctypes.c_int(torch.get_num_threads()))
