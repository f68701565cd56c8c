"""The drafter that never proposes: speculation off, everything else as usual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.drafter.methods import DraftItem, NewTokens, ProposeItem, Setting, Traits, WireTensor
from services.runtime.config import Frozen


class NoneOptions(Frozen):
    """Nothing to set."""


class Method:
    """Holds no sessions and drafts nothing."""

    Options = NoneOptions
    inline_tokens = 1 << 30
    projection: Sequence[WireTensor] = ()

    def __init__(self, options: Any, setting: Setting) -> None:
        self.traits = Traits(kind="none", max_draft_tokens=0)

    def open(self, key: int) -> None:
        """Nothing to hold."""

    def commit(self, news: Sequence[NewTokens]) -> None:
        """Nothing to hold."""

    def propose(self, items: Sequence[ProposeItem]) -> list[DraftItem]:
        """An empty draft each."""
        return [DraftItem([]) for _ in items]

    def close(self, key: int) -> None:
        """Nothing to free."""
