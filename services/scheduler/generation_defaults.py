"""What a model's generation_config.json says about requests that are silent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError

_MAX_TEMPERATURE = 100.0
_MAX_TOP_K = 2**31 - 1
_PENALTIES = (1e-30, 1e30)  # both are numbers in float32, in which they travel


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values of options that a request leaves out; as constructed, they change nothing."""

    temperature: float = 0.0
    """0 is greedy: also the default of a file that does not set `do_sample`, whatever temperature it names."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None where the file has no `max_new_tokens`."""

    @classmethod
    def parse(cls, config: Mapping[str, Any], path: Path) -> GenerationDefaults:
        """Reads the object of the file `path`. Raises CheckpointError naming file, key and value."""
        get = _Reader(config, path)
        sampled = get("do_sample", "true or false", lambda v: isinstance(v, bool), False)
        temperature = get.number("temperature", f"0 to {_MAX_TEMPERATURE:g}", lambda v: 0 <= v <= _MAX_TEMPERATURE, 1)
        return cls(
            temperature=temperature if sampled else 0.0,
            top_p=get.number("top_p", "above 0, at most 1", lambda v: 0 < v <= 1, 1),
            top_k=get("top_k", f"an integer, 0 to {_MAX_TOP_K}", lambda v: _is_integer(v) and 0 <= v <= _MAX_TOP_K, 0),
            min_p=get.number("min_p", "0 to 1", lambda v: 0 <= v <= 1, 0),
            repetition_penalty=get.number(
                "repetition_penalty", "1e-30 to 1e30", lambda v: _PENALTIES[0] <= v <= _PENALTIES[1], 1
            ),
            max_tokens=get("max_new_tokens", "an integer, at least 1", lambda v: _is_integer(v) and v >= 1, None),
        )


class _Reader:
    """Takes checked values out of one file; null is as good as absent."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = config, path

    def __call__(self, key: str, wanted: str, fits: Callable[[Any], bool], default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            return default
        if not fits(value):
            raise CheckpointError(f"{self._path}: {key} is {value!r}; {wanted}")
        return value

    def number(self, key: str, wanted: str, fits: Callable[[float], bool], default: float) -> float:
        return float(self(key, wanted, lambda v: _is_number(v) and fits(v), default))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))
