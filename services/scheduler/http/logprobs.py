"""Log-probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from services.scheduler.outcomes import Logprobs
from services.scheduler.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


class Collector(Protocol):
    """Turns the tokens of one answer, as they come, into one shape."""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        """The shape of these tokens alone."""


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`, an entry for every token, the one that stopped too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        """The shape of these tokens alone."""
        return {"content": list(map(self._entry, token_ids, logprobs)), "refusal": None}

    def _entry(self, token_id: int, given: Logprobs) -> dict[str, Any]:
        top = [self._token(other, logprob) for other, logprob in zip(given.top_ids, given.top, strict=True)]
        return self._token(token_id, given.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": name(raw), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}


class CompletionLogprobs:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`: lists with an entry for every token.

    A text_offset is the number of whole characters that the answer's tokens before it make.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
        """The shape of these tokens alone; offsets count from the answer's first token."""
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [max(given.logprob, _LOWEST) for given in logprobs],
            "top_logprobs": list(map(self._top, token_ids, logprobs)),
            "text_offset": [self._advance(token_id) for token_id in token_ids],
        }

    def _top(self, token_id: int, given: Logprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that was drawn if it is none of them."""
        pairs = [*zip(given.top_ids, given.top, strict=True), (token_id, given.logprob)]
        return {self._name(other): max(logprob, _LOWEST) for other, logprob in pairs}

    def _name(self, token_id: int) -> str:
        return name(self._tokenizer.token_bytes(token_id))

    def _advance(self, token_id: int) -> int:
        before = self._offset
        if not self._tokenizer.is_special(token_id):
            self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))
        return before


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Consecutive shapes as one; an answer without tokens has empty lists."""
    lists = {key for part in parts for key, value in part.items() if isinstance(value, list)}
    whole = dict(parts[0]) if parts else {}
    return whole | {key: [item for part in parts for item in part[key]] for key in whole if key in lists}


def name(raw: bytes) -> str:
    """A token's text; one that holds a part of a character is spelt out as OpenAI does: "bytes:\\xf0\\x9f"."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
