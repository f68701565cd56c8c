"""Text comes as its tokens do: never half a character, and in sum what decoding everything at once gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from services.scheduler.answer import Answer
from services.scheduler.detokenizer import Detokenizer
from services.scheduler.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="module")
def single(tokenizer_folder: Path) -> list[int]:
    """By byte, the id of the token that is this byte."""
    library = Library.from_file(str(tokenizer_folder / "tokenizer.json"))
    # The alphabet of byte-level BPE: printable Latin-1 stands for itself, the rest for 256 and up, in order.
    own = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(256, 512))
    return [library.token_to_id(chr(byte if byte in own else next(rest))) for byte in range(256)]


def sentencepiece() -> Library:
    """Decodes as Llama 2 does: a leading space that belongs to nobody, bytes for what has no token."""
    words = ["<unk>", "<s>", "▁", "▁a", "b", "▁日", *(f"<0x{byte:02X}>" for byte in range(256))]
    library = Library(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<s>"])
    return library


def groups(ids: list[int], rng: random.Random) -> list[list[int]]:
    """`ids` cut at random places."""
    cuts = sorted(rng.sample(range(1, len(ids)), k=rng.randrange(len(ids)))) if len(ids) > 1 else []
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer, single: list[int]) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = [single[byte] for byte in "é🙂!".encode()]
    assert [detokenizer.feed([i]) for i in ids] == ["", "é", "", "", "", "🙂", "!"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("seed", range(30))
def test_random_ids_decode_to_the_whole(tokenizer: Tokenizer, seed: int) -> None:
    """Random ids hold every kind of broken character, special tokens in the middle of one, and ids without a token."""
    rng = random.Random(seed)
    ids = [rng.randrange(330) for _ in range(rng.randrange(1, 60))]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.feed, groups(ids, rng))) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(30))
def test_decoders_that_drop_a_leading_space(seed: int) -> None:
    rng = random.Random(seed)
    decode = sentencepiece().decode
    pieces = [[1], [2], [3], [4], [5], *([6 + byte for byte in char.encode()] for char in "aé日🙂")]
    ids = [i for _ in range(rng.randrange(1, 40)) for i in rng.choice(pieces)]
    detokenizer = Detokenizer(decode)
    assert "".join(map(detokenizer.feed, groups(ids, rng))) + detokenizer.flush() == decode(ids)


@pytest.mark.parametrize("seed", range(10))
def test_real_text_has_no_replacement_character_on_the_way(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("abc äöü日本語🙂🙃\n") for _ in range(50))
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.feed(group) for group in groups(ids, rng)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == text


@pytest.mark.parametrize("seed", range(20))
def test_what_is_shown_depends_on_the_ids_alone(tokenizer: Tokenizer, seed: int) -> None:
    """So a stream resumed from the ids a client holds goes on with exactly the text that client lacks."""
    rng = random.Random(seed)
    ids = [rng.randrange(330) for _ in range(40)]
    held = rng.randrange(1, 40)
    for stops in ((), ("e", "he")):
        one, other = (Answer(tokenizer.detokenizer(), stops) for _ in range(2))
        assert collect(one, [ids[:held]]) == collect(other, groups(ids[:held], rng))
        if one.stop_match is None:
            assert collect(one, [ids[held:]]) + one.finish() == collect(other, groups(ids[held:], rng)) + other.finish()
        assert one.token_ids == other.token_ids and one.stop_match == other.stop_match


def collect(answer: Answer, pieces: list[list[int]]) -> str:
    text = ""
    for piece in pieces:
        if answer.stop_match is None:
            text += answer.feed(piece)[1]
    return text


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("a<|begin|> b<tool>")
    assert detokenizer.feed(ids) + detokenizer.flush() == "a b<tool>"  # <tool> is added, but not special


def test_half_a_character_at_the_end_comes_out_as_decoding_gives_it(tokenizer: Tokenizer, single: list[int]) -> None:
    ids = [single[0xF0]]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed(ids) == ""
    assert detokenizer.flush() == "\ufffd" == tokenizer.decode(ids)
