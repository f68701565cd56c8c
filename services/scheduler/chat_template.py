"""Renders a conversation into the text a model was trained on, with the model's own template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kadence.errors import CheckpointError, InvalidRequestError


class ChatTemplate:
    """A compiled template; the same environment and variables as transformers' apply_chat_template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], file: str = "tokenizer_config.json") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        if not isinstance(source, str):
            raise CheckpointError(f"{file}: chat_template is {source!r}, expected text")
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{file}: chat_template does not compile: {error}") from error

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Text of the (role, content) pairs and the opening of the answer. Raises InvalidRequestError."""
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError.of("messages", f"refused by the model's chat template: {error}") from error
        except Exception as error:  # the template is the model's program, and may fail in any way a program can
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequestError.of("messages", f"the model's chat template failed on them: {reason}") from error


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape HTML characters


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
