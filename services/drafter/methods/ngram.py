"""Prompt look-up: propose what followed the last time the newest tokens were seen. No weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from services.drafter.methods import DraftItem, NewTokens, ProposeItem, Setting, Traits, WireTensor
from services.runtime.config import Frozen

_TOKEN_BITS = 32


class NgramOptions(Frozen):
    """Lengths of the suffix that is looked up, longest first."""

    min_n: int = Field(2, ge=1, le=16)
    max_n: int = Field(5, ge=1, le=16)

    @model_validator(mode="after")
    def _ordered(self) -> NgramOptions:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n = {self.min_n} must not exceed max_n = {self.max_n}")
        return self


class NgramIndex:
    """One session's tokens, and where each n-gram was last followed by something.

    An n-gram is one integer, 32 bits a token; the suffix of each length is kept up to date by shift and mask, so a
    token costs one dictionary entry per length and a look-up one probe per length.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._lengths = range(min_n, max_n + 1)
        self._masks = [(1 << (_TOKEN_BITS * n)) - 1 for n in self._lengths]
        self._after: list[dict[int, int]] = [{} for _ in self._lengths]
        """Per length: n-gram -> index of the token that followed its latest occurrence."""
        self._suffix = 0
        """The newest max_n tokens."""
        self._tokens = array("i")

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds committed tokens."""
        position, suffix, longest = len(self._tokens), self._suffix, self._masks[-1]
        lengths = list(zip(self._lengths, self._masks, self._after, strict=True))
        for token in token_ids:
            # The suffix enters the index only now that something follows it: a look-up never finds itself.
            for n, mask, after in lengths:
                if position < n:
                    break
                after[suffix & mask] = position
            suffix = (suffix << _TOKEN_BITS | token) & longest
            position += 1
        self._suffix = suffix
        self._tokens.extend(token_ids)

    def draft(self, max_tokens: int) -> list[int]:
        """What followed the latest earlier occurrence of the longest known suffix; [] if none is known."""
        size = len(self._tokens)
        for n, mask, after in zip(reversed(self._lengths), reversed(self._masks), reversed(self._after), strict=True):
            if size > n and (start := after.get(self._suffix & mask)) is not None:
                return self._copy(start, max_tokens)
        return []

    def _copy(self, start: int, count: int) -> list[int]:
        """`count` tokens from `start` on. Where the text ends the copy runs on into itself, as in LZ77: a match close
        to the end means a loop, and its next turns are the best guess."""
        found = self._tokens[start : start + count].tolist()
        period = len(found)
        while len(found) < count:
            found.append(found[-period])
        return found


class Method:
    """An index per session."""

    Options = NgramOptions
    inline_tokens = 512
    projection: Sequence[WireTensor] = ()

    def __init__(self, options: Any, setting: Setting) -> None:
        self._options: NgramOptions = options
        self._sessions: dict[int, NgramIndex] = {}
        self.traits = Traits(kind="ngram", max_draft_tokens=setting.max_draft_tokens)

    def open(self, key: int) -> None:
        """Begins an empty index."""
        self._sessions[key] = NgramIndex(self._options.min_n, self._options.max_n)

    def commit(self, news: Sequence[NewTokens]) -> None:
        """Adds tokens; there are no rows."""
        for new in news:
            self._sessions[new.key].append(new.token_ids)

    def propose(self, items: Sequence[ProposeItem]) -> list[DraftItem]:
        """One look-up each."""
        return [DraftItem(self._sessions[item.key].draft(item.max_tokens)) for item in items]

    def close(self, key: int) -> None:
        """Forgets the index."""
        del self._sessions[key]
