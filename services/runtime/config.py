"""Reads one TOML file into the frozen, validated configuration of one service; an unknown key is fatal."""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kadence.errors import ConfigError

# Tables a configuration file may hold. Each service reads its own and those it shares with others.
SECTIONS = ("cluster", "model", "scheduler", "verifier", "drafter", "policy")
SHARED = ("model", "policy")


class Frozen(BaseModel):
    """Base of every configuration: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class ModelConfig(Frozen):
    """The target model."""

    path: str = Field(min_length=1)
    """A folder, or a name that `kadence models list` shows."""
    name: str = ""
    """Name in requests; empty takes the folder's."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class ServiceConfig(Frozen):
    """What every service has: where it listens, how it logs, whom it attaches to."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to bind."""
    port: int = Field(0, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    advertise: str = ""
    """Host that peers dial; empty takes `host`."""
    metrics_port: int = Field(0, ge=-1, le=65535)
    """Prometheus port; 0 takes a free one, -1 switches it off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    scheduler: str = ""
    """Address of the scheduler to attach to; empty attaches to none."""
    drain_seconds: float = Field(10.0, ge=0, le=3600)
    """Longest wait for running work when asked to stop."""


C = TypeVar("C", bound=BaseModel)


def load(cls: type[C], path: str | Path | None, section: str, overrides: Mapping[str, Any] | None = None) -> C:
    """The table `section` of the file at `path` (None: all defaults), then `overrides` ("verifier.page_size": 16).

    A field of `cls` named model or policy is filled from the table of that name. Raises ConfigError, one line.
    """
    assert section in SECTIONS, section
    document = override(read(path), overrides or {})
    data = dict(document.get(section, {}))
    for name in SHARED:
        if name in cls.model_fields and name in document:
            data[name] = {**document[name], **data.get(name, {})}
    return parse(cls, data, source(path), section)


def source(path: str | Path | None) -> str:
    """How error messages name the file at `path`."""
    return str(path) if path is not None else "configuration"


def read(path: str | Path | None) -> dict[str, Any]:
    """The file's tables, their names checked; {} for None. Raises ConfigError."""
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for name, table in document.items():
        if name not in SECTIONS:
            raise ConfigError(f"{path}: unknown section [{name}]{_hint(name, SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} = {_text(table)}: must be a table, [{name}]")
    return document


def override(document: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with values set by dotted key. Raises ConfigError for an unknown section."""
    merged = json.loads(json.dumps(document, default=str))  # tables are small; a deep copy keeps the caller's intact
    for dotted, value in overrides.items():
        *tables, key = dotted.split(".")
        if dotted in SECTIONS:
            raise ConfigError(f"{dotted} = {_text(value)}: must be a table, or set its keys, as {dotted}.KEY")
        if not tables or tables[0] not in SECTIONS:
            raise ConfigError(f"{dotted}: unknown section{_hint(dotted.split('.')[0], SECTIONS)}")
        place = merged
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{dotted}: {table} is not a table")
        place[key] = value
    return merged


def assignment(text: str) -> tuple[str, Any]:
    """Splits "key=value" of the command line; the value is read as TOML and else taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text}: must read section.key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def parse(cls: type[C], data: Mapping[str, Any], file: str, section: str = "") -> C:
    """Validates one table; `file` and `section` name it in errors. Raises ConfigError for the first thing wrong."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        # An unknown key explains a missing one (it was misspelt), so it is told first.
        first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        raise ConfigError(f"{file}: {_explain(cls, first, section)}") from error


def _explain(cls: type[BaseModel], error: Any, section: str) -> str:
    *parents, key = [str(part) for part in error["loc"]] or [""]
    tables = parents if parents and parents[0] in SHARED else [section, *parents]
    table = ".".join(part for part in tables if part)
    where = f"[{table}] " if table else ""
    if error["type"] == "extra_forbidden":
        return f"{where}unknown key {key}{_hint(key, _keys(cls, parents))}"
    if error["type"] == "missing":
        return f"{where}{key} is required"
    reason = str(error["msg"]).removeprefix("Value error, ").replace("Input should", "should")
    if not key:
        return f"{where}{reason}"
    return f"{where}{key} = {_text(error['input'])}: {reason}"


def _keys(cls: type[BaseModel], parents: Sequence[str]) -> list[str]:
    """Field names of the table found by walking `parents` from `cls`."""
    here: Any = cls
    for name in parents:
        field = here.model_fields.get(name) if hasattr(here, "model_fields") else None
        options = _union(field.annotation) if field is not None else []
        here = next((option for option in options if hasattr(option, "model_fields")), None)
    return list(here.model_fields) if here is not None else []


def _union(annotation: Any) -> list[Any]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return list(typing.get_args(annotation)) if is_union else [annotation]


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; known: {', '.join(known)}" if known else ""


def _text(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def show(config: BaseModel, section: str = "") -> str:
    """The resolved configuration as TOML that `load` would read back."""
    tables: dict[str, dict[str, Any]] = {}
    _collect(config.model_dump(mode="json"), section, tables)
    blocks = []
    for name, values in tables.items():
        lines = [f"[{name}]"] if name else []
        blocks.append("\n".join([*lines, *(f"{key} = {_toml(value)}" for key, value in values.items())]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _collect(data: dict[str, Any], prefix: str, tables: dict[str, dict[str, Any]]) -> None:
    tables[prefix] = {key: value for key, value in data.items() if not isinstance(value, dict) and value is not None}
    for key, value in data.items():
        if isinstance(value, dict):
            _collect(value, key if key in SHARED or not prefix else f"{prefix}.{key}", tables)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)  # JSON's strings, numbers and booleans are TOML's
