"""Examples in files: what is written is read again, and folders hold what one target and one set of taps gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kadence.errors import ConfigError
from training.conversations import Conversation
from training.examples import Cache, Example, Origin, write

ORIGIN = Origin("aa", (1, 3), 4)


def some(count: int, seed: int, width: int = 6) -> tuple[list[Conversation], list[Example]]:
    """Conversations of different lengths, with random features."""
    generator = torch.Generator().manual_seed(seed)
    conversations, examples = [], []
    for number in range(count):
        tokens = torch.randint(50, (5 + 3 * number,), generator=generator)
        prompt = 2 + number
        conversations.append(Conversation(tuple(tokens[:prompt].tolist()), tuple(tokens[prompt:].tolist())))
        answer = len(tokens) - prompt
        taps = torch.randn(len(tokens), width, generator=generator).bfloat16()
        ids = torch.randint(50, (answer, 4), generator=generator)
        examples.append(Example(tokens, prompt, taps, ids, torch.rand(answer, 4, generator=generator)))
    return conversations, examples


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = [some(5, 1), some(3, 2)]
    for name, (conversations, examples) in zip("ba", written, strict=True):
        write(tmp_path / f"{name}.safetensors", conversations, examples, ORIGIN)
    (tmp_path / "c.part").write_bytes(b"half a file")
    cache = Cache(tmp_path)
    assert (cache.model, cache.taps, cache.width) == ("aa", (1, 3), 6)
    wanted = [pair for made in reversed(written) for pair in zip(*made, strict=True)]
    assert len(cache) == len(wanted) == 8
    for index in (6, 0, 3, 7, 1, 2, 4, 5):
        conversation, example = wanted[index]
        got = cache[index]
        assert cache.digest(index) == conversation.digest.hex()
        assert got.prompt == example.prompt == len(conversation.prompt)
        assert (got.tokens.dtype, got.ids.dtype, got.p.dtype) == (torch.int64, torch.int64, torch.float32)
        for name in ("tokens", "taps", "ids"):
            assert torch.equal(getattr(got, name), getattr(example, name))
        assert torch.allclose(got.p, example.p, atol=5e-4)  # kept in half precision


def test_taps_are_kept_in_bfloat16_whatever_they_were_computed_in(tmp_path: Path) -> None:
    conversations, examples = some(2, 1)
    wide = [replace(e, taps=e.taps.float() + 1e-4) for e in examples]
    write(tmp_path / "a.safetensors", conversations, wide, ORIGIN)
    assert torch.equal(Cache(tmp_path)[1].taps, wide[1].taps.bfloat16())


def test_prompts_are_told_apart_whatever_is_answered(tmp_path: Path) -> None:
    conversations, examples = some(4, 1)
    prompts = [conversations[i].prompt for i in (0, 1, 0, 1)]
    made = [Conversation(prompt, c.response) for prompt, c in zip(prompts, conversations, strict=True)]
    swapped = [
        replace(e, tokens=torch.cat([torch.tensor(p), e.tokens[e.prompt :]]), prompt=len(p))
        for p, e in zip(prompts, examples, strict=True)
    ]
    rows = [torch.zeros(len(e.tokens), 6).bfloat16() for e in swapped]
    write(tmp_path / "a.safetensors", made, [replace(e, taps=t) for e, t in zip(swapped, rows, strict=True)], ORIGIN)
    cache = Cache(tmp_path)
    names = [cache.prompt_digest(index) for index in range(4)]
    assert names[0] == names[2] != names[1] == names[3]
    assert len({cache.digest(index) for index in range(4)}) == 4


def test_files_of_a_version_that_did_not_say_are_read(tmp_path: Path) -> None:
    write(tmp_path / "0.safetensors", *some(2, 1))
    assert Cache(tmp_path).taps is None and Cache(tmp_path).model == ""
    write(tmp_path / "a.safetensors", *some(2, 2), ORIGIN)
    write(tmp_path / "z.safetensors", *some(2, 3), ORIGIN)
    assert Cache(tmp_path).taps == (1, 3) and len(Cache(tmp_path)) == 6


def test_some_of_the_taps_can_be_chosen(tmp_path: Path) -> None:
    conversations, examples = some(2, 2, 6)
    write(tmp_path / "a.safetensors", conversations, examples, Origin("aa", (1, 3, 7), 4))
    cache = Cache(tmp_path)
    with pytest.raises(ValueError, match="taps"):
        cache.choose((1, 2))
    cache.choose((1, 7))
    assert (cache.taps, cache.width) == ((1, 7), 4)
    assert cache[1].taps.equal(examples[1].taps[:, [0, 1, 4, 5]]) and cache[1].tokens.equal(examples[1].tokens)
    cache.choose((7,))
    assert cache[1].taps.equal(examples[1].taps[:, 4:])
    with pytest.raises(ValueError, match="taps"):
        cache.choose((1,))


@pytest.mark.parametrize(
    ("origin", "width", "told"),
    [
        (Origin("bb", (1, 3), 4), 6, "model is bb, in other files of the folder aa"),
        (Origin("aa", (1, 2), 4), 6, "taps is 1,2, in other files of the folder 1,3"),
        (Origin("aa", (1, 3), 8), 6, "likeliest is 8, in other files of the folder 4"),
        (None, 4, "taps are 4 wide, in other files of the folder 6"),
    ],
)
def test_files_that_do_not_belong_together_are_told(
    tmp_path: Path, origin: Origin | None, width: int, told: str
) -> None:
    write(tmp_path / "a.safetensors", *some(2, 1), ORIGIN)
    write(tmp_path / "b.safetensors", *some(2, 2, width), origin)
    with pytest.raises(ConfigError, match=rf"b\.safetensors: {told}"):
        Cache(tmp_path)


def test_damaged_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no features there; `python -m training\.features` makes them"):
        Cache(tmp_path)
    path = tmp_path / "a.safetensors"
    write(path, *some(2, 1), ORIGIN)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"a\.safetensors: damaged"):
        Cache(tmp_path)
