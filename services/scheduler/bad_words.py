"""Makes token sequences of words that may not be produced, as vLLM does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kadence.errors import FieldViolation

Encode = Callable[[Sequence[str]], list[list[int]]]


def sequences(words: Sequence[str], encode: Encode) -> tuple[tuple[tuple[int, ...], ...], list[FieldViolation]]:
    """(the sequences, each once; what is wrong with words that make no tokens).

    A word is tokenised as it begins a text and, if that gives as many tokens with another first one, as it follows a
    space (vLLM, SamplingParams.update_from_tokenizer). Space in front of it does not matter, as there; a word that is
    nothing but space is taken as it stands.
    """
    bare = [word.lstrip() or word for word in words]
    alone, spaced = encode(bare), encode([f" {word}" for word in bare])
    found: dict[tuple[int, ...], None] = {}
    wrong = []
    for index, (first, second) in enumerate(zip(alone, spaced, strict=True)):
        if not first:
            wrong.append(FieldViolation(f"sampling.bad_words[{index}]", f"{bare[index]!r} makes no token; at least 1"))
            continue
        found[tuple(first)] = None
        if len(second) == len(first) and second[0] != first[0]:
            found[tuple(second)] = None
    return tuple(found), wrong
