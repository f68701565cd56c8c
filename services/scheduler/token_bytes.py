"""The exact bytes of single tokens, which text cannot give where a character is cut between two of them."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # how SentencePiece writes a space


class TokenBytes:
    """Token id to bytes, for one tokenizer; remembers what it was asked."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        kinds = _kinds(tokenizer.decoder)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._spaces = bool(kinds & {"Metaspace", "Replace"})
        self._alphabet = _byte_alphabet()
        self._known: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Bytes of one token; of a special token its name's, of an id without a token none."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def special(self, token_id: int) -> bool:
        """Whether text leaves it out."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def _read(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._byte_level:
            return b"".join(self._alphabet.get(char) or char.encode() for char in piece)
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if self._spaces:
            return piece.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _kinds(decoder: Any) -> set[str]:
    """Types of the decoder and of those it is made of."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("decoders", ()))}


def _byte_alphabet() -> dict[str, bytes]:
    """The character that byte-level BPE writes for each byte (GPT-2): itself if it is visible, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    alphabet = {chr(byte): bytes([byte]) for byte in seen}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(unseen)}
