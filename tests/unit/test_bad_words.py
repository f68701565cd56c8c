"""Words that may not be produced become the sequences that vLLM makes of them, with transformers' tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.scheduler import bad_words
from services.scheduler.tokenizer import Tokenizer

WORDS = ["the", " quick", "quick", "brown fox", "日本", "<tool>", "zebra crossing", "the"]


def reference(words: list[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """vLLM's loop (SamplingParams.update_from_tokenizer), line for line."""
    found: list[list[int]] = []
    for bad_word in words:
        for add_prefix_space in [False, True]:
            prefix = " " if add_prefix_space else ""
            prompt = prefix + bad_word.lstrip()
            ids = encode(prompt)
            if (not add_prefix_space) or (ids[0] != found[-1][0] and len(ids) == len(found[-1])):
                found.append(ids)
    return found


def test_byte_level(tokenizer_folder: Path) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder / "tokenizer.json"))
    expected = reference(WORDS, lambda text: theirs.encode(text, add_special_tokens=False))
    found, wrong = bad_words.sequences(WORDS, Tokenizer.load(tokenizer_folder).encode_words)
    assert {tuple(ids) for ids in expected} == set(found) and not wrong
    assert len(found) == len(set(found))
    assert len(set(found)) > len({word.strip() for word in WORDS})  # some have a second spelling, and not all
    assert len(found) < 2 * len({word.strip() for word in WORDS})


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_spaces_as_sentencepiece_marks_them(tokenizer_folder: Path, tmp_path: Path, scheme: str) -> None:
    """A tokenizer may put a space in front of every text by itself; then both spellings are one."""
    rust = Rust(models.WordLevel({"<unk>": 0, "▁the": 1, "the": 2, "▁": 3, "▁fox": 4, "fox": 5, "▁▁the": 6}, "<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    rust.decoder = decoders.Metaspace(prepend_scheme=scheme)
    rust.save(str(tmp_path / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(json.loads((tokenizer_folder / name).read_text())))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    words = ["the", "fox", "the fox"]
    expected = reference(words, lambda text: theirs.encode(text, add_special_tokens=False))
    found, wrong = bad_words.sequences(words, Tokenizer.load(tmp_path).encode_words)
    assert {tuple(ids) for ids in expected} == set(found) and not wrong


def test_a_second_spelling_has_another_first_token() -> None:
    for spaced, expected in (([1, 3], 1), ([2, 2], 2), ([4, 1, 2], 1)):
        found, _ = bad_words.sequences(["x"], lambda texts, spaced=spaced: [spaced if texts[0] == " x" else [1, 2]])
        assert len(found) == expected


def test_space_alone_is_taken_as_it_stands(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    found, wrong = bad_words.sequences(["\n"], tokenizer.encode_words)
    assert tuple(tokenizer.encode("\n")) in found and not wrong


def test_a_word_without_tokens_is_named() -> None:
    found, wrong = bad_words.sequences(["a", "\u200b"], lambda texts: [[7] if "a" in text else [] for text in texts])
    assert found == ((7,),)
    assert [v.field for v in wrong] == ["sampling.bad_words[1]"] and "no token" in wrong[0].description
