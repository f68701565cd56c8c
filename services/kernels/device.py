"""Moves what a step was planned as to the device that runs it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def moved(plan: T, device: torch.device) -> T:
    """`plan`, a tensor or dataclasses, lists and tuples of tensors, with every tensor on `device`.

    Plans are made on the host: they are small and made of Python numbers. On a CPU it is the same object.
    """
    return plan if device.type == "cpu" else _moved(plan, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
    return value
