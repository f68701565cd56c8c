"""The bytes of tokens, laid end to end, are the text: for byte-level BPE and for SentencePiece's byte fallback."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from services.scheduler.token_bytes import TokenBytes
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model

TEXTS = ["hello world, the fox", "äöü 日本語 🙂🙃 \u0301\u200b", "\x00\x7f\u00a0\u00ad\t\n", "Größe ŁĠ \U0010ffff"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level(tokenizer_folder: Path, text: str) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_every_byte_has_a_token(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    single = {tokenizer.token_bytes(token) for token in range(tiny_model.VOCAB_SIZE)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_special_and_missing_tokens(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    assert tokenizer.token_bytes(tiny_model.END) == b"<|end|>" and tokenizer.is_special(tiny_model.END)
    assert not tokenizer.is_special(5) and not tokenizer.is_special(tiny_model.VOCAB_SIZE - 1)
    assert tokenizer.token_bytes(tiny_model.VOCAB_SIZE - 1) == b""  # a row of the model that no token has


def test_names_of_added_tokens_are_plain_text(tokenizer_folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<｜fin▁é｜>"])  # each of its letters would also stand for a byte, or for none
    token = tokenizer.token_to_id("<｜fin▁é｜>")
    read = TokenBytes(tokenizer)
    assert read(token) == "<｜fin▁é｜>".encode() and read.special(token)


def sentencepiece(pieces: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer as Llama 2's is: spaces as a visible character, bytes as their names."""
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", *pieces])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_byte_fallback() -> None:
    pieces = ["▁fox", *(f"<0x{byte:02X}>" for byte in "🙂".encode()), "s", "<0x4>"]
    tokenizer = sentencepiece(pieces)
    read = TokenBytes(tokenizer)
    ids = list(range(1, len(pieces) + 1))
    assert b"".join(map(read, ids)).decode() == tokenizer.decode(ids) == " fox🙂s<0x4>"
    assert read(2) == "🙂".encode()[:1]


def test_without_a_decoder() -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"fox": 0, "<0x41>": 1}, unk_token="fox"))
    assert [TokenBytes(tokenizer)(token) for token in (0, 1)] == [b"fox", b"<0x41>"]
