"""Python values into protobuf fields; what does not fit is refused in one line naming field, value and limit."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from kadence.errors import InvalidRequestError

_INT32, _UINT64 = (-(2**31), 2**31 - 1), (0, 2**64 - 1)
_FLOAT_RANGE = "0, or 1.4e-45 to 3.4e38 in size (32-bit floating point)"


class _UnfitError(Exception):
    """Says what the field takes."""


def assign(message: Any, name: str, path: str, value: Any) -> None:
    """Sets one field. Raises InvalidRequestError naming `path`, `value` and what the field takes instead."""
    field = message.DESCRIPTOR.fields_by_name[name]
    target = getattr(message, name)
    if hasattr(target, "update"):
        _fill_map(field, target, path, value)
    elif hasattr(target, "extend"):
        _fill_list(field, target, path, value)
    else:
        setattr(message, name, _checked(field, path, value, ""))


def short(value: Any) -> str:
    """A value for a message: one line of at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a huge number"
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def _fill_map(field: Any, target: Any, path: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError.of(path, f"{short(value)}; an object of token ids and numbers")
    entry = field.message_type.fields_by_name
    for key, item in value.items():
        number = _checked(entry["key"], path, key, "token id ")
        target[number] = _checked(entry["value"], path, item, f"the number for token id {number} is ")


def _fill_list(field: Any, target: Any, path: str, value: Any) -> None:
    of_strings = field.type == FieldDescriptor.TYPE_STRING
    if of_strings and isinstance(value, str):
        value = [value]  # stop="x" means one string, not its letters
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError.of(path, f"{short(value)}; a list of {'strings' if of_strings else 'token ids'}")
    what = "string" if of_strings else "token"
    if not of_strings:
        try:
            target.extend(value)  # prompts are long: one call for all, and a closer look only if it fails
            return
        except (TypeError, ValueError):
            del target[:]
    target.extend([_checked(field, path, item, f"{what} {index} is ") for index, item in enumerate(value)])


def _checked(field: Any, path: str, value: Any, before: str) -> Any:
    """`value` as protobuf takes it; `before` introduces it in the message if it does not fit."""
    try:
        if field.type == FieldDescriptor.TYPE_STRING:
            return _string(value)
        if field.type == FieldDescriptor.TYPE_FLOAT:
            return _float(value)
        if field.type == FieldDescriptor.TYPE_BOOL:
            return _bool(value)
        return _whole(value, *(_UINT64 if field.type == FieldDescriptor.TYPE_UINT64 else _INT32))
    except _UnfitError as unfit:
        raise InvalidRequestError.of(path, f"{before}{short(value)}; {unfit}") from None


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _UnfitError("a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _UnfitError("a string of whole Unicode characters, without surrogates") from None
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, int) or value not in (0, 1):
        raise _UnfitError("true or false")
    return bool(value)


def _whole(value: Any, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _UnfitError("a whole number") from None
    if isinstance(value, bool):
        raise _UnfitError("a whole number")
    if not low <= number <= high:
        # No field has a use for a negative number: those that can travel are left to the server.
        raise _UnfitError(f"0 to {high}")
    return number


def _float(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise _UnfitError("a number")
    try:
        number = float(value)
        travelled: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        raise _UnfitError(_FLOAT_RANGE) from None
    except (TypeError, ValueError):
        raise _UnfitError("a number") from None
    if (travelled == 0) != (number == 0) or math.isinf(travelled) != math.isinf(number):
        raise _UnfitError(_FLOAT_RANGE)
    return number
