"""A device that is not there: tensors that compute on the host, and cannot be mixed with the host's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = (Tensor.numpy, Tensor.__array__, Tensor.data_ptr)
# What CUDA takes from the host: a copy's source, and index tensors.
_MIXES = (Tensor.copy_, Tensor.__getitem__)
_DEVICE = torch.device("cuda")


class _There(Tensor):
    """A tensor on the device."""


class MockCuda(TorchFunctionMode):
    """Within this context there is a device "cuda", which refuses what a real one would refuse.

    A tensor made or moved there says so, its results are there too, and an operation that also takes a tensor of the
    host with at least one dimension raises RuntimeError, as does reading its memory. What the device computes is what
    the host computes. Streams, events and graphs are not there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        there = any(isinstance(tensor, _There) for tensor in tensors)
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return _DEVICE if there else func(*args)
        if there and func in _READS:
            raise RuntimeError(f"{func.__name__} of a tensor on the device")
        if there and func not in _MIXES and any(not isinstance(t, _There) and t.dim() for t in tensors):
            raise RuntimeError(f"{getattr(func, '__name__', func)} of tensors on the device and on the host")
        wanted = _wanted(func, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*_hosted(args), **_hosted(kwargs))
        return _marked(out, there if wanted is None else wanted.type == "cuda")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _wanted(func: Any, value: Any) -> torch.device | None:
    """The device that a call names."""
    if func is Tensor.cpu:
        return torch.device("cpu")
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda"):
        return torch.device(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _wanted(None, item)) is not None), None)
    return None


def _hosted(value: Any) -> Any:
    """The arguments with the device replaced by the host."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] == "cuda"):
        return torch.device("cpu")
    if isinstance(value, dict):
        return {key: _hosted(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_hosted(item) for item in value)
    return value


def _marked(value: Any, there: bool) -> Any:
    if isinstance(value, Tensor):
        if there:
            return value if isinstance(value, _There) else value.as_subclass(_There)
        return value.as_subclass(Tensor) if isinstance(value, _There) else value
    if isinstance(value, list | tuple):
        items = [_marked(item, there) for item in value]
        return type(value)(items)
    return value
