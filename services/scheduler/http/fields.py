"""The kinds of values that requests hold, and what is said of those that are not of their kind."""

from __future__ import annotations

import difflib
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from kadence.errors import FieldViolation
from services.scheduler.validate_sampling import MAX_BIASES

_SHOWN = 64
_MOST_FIELDS = 64
_WHOLE = re.compile(r"-?[0-9]{1,10}")
_INT32 = 2**31

_SAYS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than_equal": "an integer of 32 bits",
    "int_type": "an integer",
    "less_than": "an integer of 32 bits",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
    "string_unicode": "Unicode text",
}


class Strict(BaseModel):
    """Base of what a request holds: no unknown field, no conversion between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _small(cls, value: Any) -> Any:
        """An error for each of a million unknown fields would fill the memory."""
        if isinstance(value, Mapping) and len(value) > _MOST_FIELDS:
            raise ValueError(f"{len(value)} fields; at most {_MOST_FIELDS}")
        return value


def text(value: str) -> str:
    """`value`, if it is Unicode: JSON can spell half a surrogate pair, which no text holds. Raises ValueError."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return value


def _float32(value: float) -> float:
    """Rounded as the contract's fields are, so that both ways in mean the same number."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return rounded


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _by_id(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} ids; at most {MAX_BIASES}")
    wrong = next((key for key in value if not _WHOLE.fullmatch(key)), None)
    if wrong is not None:
        raise ValueError(f"{shown(wrong)}; token ids as keys")
    return {int(key): bias for key, bias in value.items()}


Int = Annotated[int, Field(ge=-_INT32, lt=_INT32)]
Number = Annotated[float, AfterValidator(_float32)]
Text = Annotated[str, AfterValidator(text)]
# Lists may be long, and one error tells enough.
Ids = Annotated[list[Int], FailFast()]
Strings = Annotated[list[Text], FailFast(), BeforeValidator(_listed)]
"""A list of strings, or one string."""
Biases = Annotated[dict[Int, Number], BeforeValidator(_by_id)]
"""Token id, as a string, to what is added."""


def violations(error: ValidationError, known: Iterable[str]) -> list[FieldViolation]:
    """What is wrong, field by field; `known` are the fields of the request."""
    return [_violation(item, list(known)) for item in error.errors(include_url=False)]


def _violation(item: Any, known: list[str]) -> FieldViolation:
    path = ""
    for part in item["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    path = path[:_SHOWN] or "body"  # a field whose name is no text has no path
    if item["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        return FieldViolation(path, "unknown field" + (f"; did you mean {close[0]}?" if close else ""))
    if item["type"] == "missing":
        return FieldViolation(path, "is required")
    if item["type"] == "value_error":
        return FieldViolation(path, str(item["ctx"]["error"]))
    return FieldViolation(path, f"{shown(item['input'])}; {_SAYS.get(item['type'], item['msg'])}")


def shown(value: Any) -> str:
    """A value in an error message, cut to what can be read."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    said = repr(value) if not isinstance(value, bool) else str(value).lower()
    return said if len(said) <= _SHOWN else said[:_SHOWN] + "…"
