"""Which rotary embedding a config.json asks for, and how long a context it reaches; read and checked without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn")
_LIMITS = (1e-30, 1e30)  # what is computed from a number in float32 stays finite


@dataclass(frozen=True)
class Linear:
    """All frequencies divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by `factor`, high ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: float


@dataclass(frozen=True)
class Yarn:
    """A ramp between kept and divided frequencies, and sharper attention (YaRN, Peng et al. 2023)."""

    factor: float
    original_positions: float
    attention_factor: float
    """What cosines and sines are multiplied with."""
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class RopeParameters:
    """The base of the frequencies, and what is done to them."""

    theta: float
    scaling: Linear | Llama3 | Yarn | None = None


def read_rope(config: Mapping[str, Any], path: Path) -> RopeParameters:
    """The rotary embedding of a config.json, in any spelling of transformers 4 and 5.

    Raises CheckpointError naming `path` (the file), key and value.
    """
    # Older files have `rope_theta` beside `rope_scaling`, newer ones all of it in `rope_parameters`.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"{path}: {key} is {rope!r}, expected an object")
    nested = next((name for name, value in rope.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise CheckpointError(f"{path}: {key} has an object for {nested!r}, supported is one for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise CheckpointError(f"{path}: rope type is {kind!r}, supported are {', '.join(KINDS)}")
    # As transformers looks them up: some keys may also stand at the top of the file.
    length = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    found = {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        **{name: value for name, value in rope.items() if value is not None},
        "original_max_position_embeddings": length or config.get("max_position_embeddings"),
    }
    number = _Numbers(found, path)
    if number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{path}: partial_rotary_factor is {found['partial_rotary_factor']!r}, supported is 1")
    theta = number("rope_theta", 10000.0)
    match kind:
        case "linear":
            return RopeParameters(theta, Linear(number("factor")))
        case "llama3":
            return RopeParameters(theta, _llama3(number, path))
        case "yarn":
            return RopeParameters(theta, _yarn(number, found, path))
    return RopeParameters(theta)


def context_length(rope: RopeParameters, positions: int) -> int:
    """Positions the model can use; `positions` is its max_position_embeddings.

    Files of models with YaRN keep the trained length there, and are meant for `factor` times as much (so does vLLM).
    """
    if isinstance(rope.scaling, Yarn):
        return max(positions, int(rope.scaling.factor * rope.scaling.original_positions))
    return positions


def positive(value: Any, key: str, path: Path) -> float:
    """A positive number of the file `path` as a float. Raises CheckpointError naming key, value and limits."""
    low, high = _LIMITS
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive number, {low:g} to {high:g}")
    return float(value)


class _Numbers:
    """Takes positive numbers out of one file."""

    def __init__(self, found: Mapping[str, Any], path: Path) -> None:
        self._found, self._path = found, path

    def __call__(self, key: str, default: float | None = None) -> float:
        value = self._found.get(key)
        value = default if value is None else value
        return positive(value, key, self._path)


def _llama3(number: _Numbers, path: Path) -> Llama3:
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{path}: high_freq_factor is {high:g}, expected more than low_freq_factor, {low:g}")
    return Llama3(number("factor"), low, high, number("original_max_position_embeddings"))


def _yarn(number: _Numbers, found: Mapping[str, Any], path: Path) -> Yarn:
    factor, truncate = number("factor"), found.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"{path}: truncate is {truncate!r}, expected true or false")
    if number("rope_theta", 10000.0) == 1:
        raise CheckpointError(f"{path}: rope_theta is 1, expected another number for yarn")

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):
        attention = mscale(number("mscale")) / mscale(number("mscale_all_dim"))
    else:
        attention = mscale(1)
    return Yarn(
        factor=factor,
        original_positions=number("original_max_position_embeddings"),
        attention_factor=number("attention_factor", attention),
        beta_fast=number("beta_fast", 32),
        beta_slow=number("beta_slow", 1),
        truncate=truncate,
    )
