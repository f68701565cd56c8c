"""Paged K/V of the drafter's context rows: which session holds which page, and the tensors the pages index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.drafter.draft_arch import DraftArch
from services.kernels.attention_plan import Layout
from services.kernels.ragged_attention import RaggedAttention

PAGE = 16


@dataclass
class _Held:
    """One session: rows [first, length) are held, from the first cell of the first page on."""

    pages: list[int] = field(default_factory=list)
    first: int = 0
    length: int = 0


@dataclass(frozen=True)
class Span:
    """Rows to be written: `rows` of them at cells [start, start + rows) of `pages`, the first at text `position`."""

    rows: int
    start: int
    pages: list[int]
    position: int


class DraftKV:
    """One page table a session for all layers.

    Where every layer slides, only the last window - 1 rows can ever be read, and whole pages of older ones are given
    back. Attention knows cells by their distance only, so a session's cells are counted from its first page on.
    """

    def __init__(
        self,
        arch: DraftArch,
        capacity_tokens: int,
        max_sessions: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Pages for `max_sessions` sessions whose `cost`s sum up to `capacity_tokens`, and for all their blocks."""
        self._window = arch.window
        self._capacity, self._max_sessions = capacity_tokens, max_sessions
        self.num_pages = pages_of(arch, capacity_tokens, max_sessions, block_size)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._sessions: dict[int, _Held] = {}
        self.tokens = 0
        """Capacity in use."""
        self.kernel: RaggedAttention | None = None
        if torch.device(device).type == "cpu":
            self.kernel = RaggedAttention.find(dtype, self.num_pages, PAGE, arch.num_kv_heads, arch.head_dim)
        self.layout = Layout(self.num_pages, PAGE, arch.num_kv_heads, dtype, native=self.kernel is not None)
        # Zeroed, for masked cells are multiplied by zero.
        shape = (2 * arch.num_kv_heads * self.num_pages, PAGE * arch.head_dim)
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(arch.num_layers)]
        """Per layer [2 * Hkv * num_pages, page * d]: K of every KV head, then V of every KV head."""

    def cost(self, length: int) -> int:
        """Tokens of capacity that a session of `length` rows takes."""
        return min(length, self._window - 1) if self._window else length

    def length(self, key: int) -> int:
        """Position of the session's next row."""
        return self._sessions[key].length

    def open(self, key: int) -> None:
        """Begins a session without rows."""
        assert key not in self._sessions and len(self._sessions) < self._max_sessions, "a session too many"
        self._sessions[key] = _Held()

    def close(self, key: int) -> None:
        """Ends a session."""
        held = self._sessions.pop(key)
        self.tokens -= self.cost(held.length - held.first)
        self._release(held.pages)

    def append(self, key: int, base: int, rows: int) -> Span:
        """Where the rows of positions [base, base + rows) go; of a long run only the last that can ever be read.

        Rows follow each other without a gap; the first of a session may have any position.
        """
        held = self._sessions[key]
        if not held.pages:
            held.first = held.length = base
        assert base == held.length, f"rows from {base} on for a session that has {held.length}"
        self.tokens -= self.cost(held.length - held.first)
        end = base + rows
        oldest = max(end - (self._window - 1), held.first) if self._window else held.first
        start = max(base, oldest)
        if start > base:  # nothing that was held is needed
            self._release(held.pages)
            held.pages, held.first = [], start
        else:
            whole = (oldest - held.first) // PAGE
            self._release(held.pages[:whole])
            held.pages, held.first = held.pages[whole:], held.first + whole * PAGE
        held.length = end
        self.tokens += self.cost(end - held.first)
        assert self.tokens <= self._capacity, "more rows than there is capacity for"
        self._grow(held.pages, end - held.first)
        return Span(end - start, start - held.first, list(held.pages), start)

    def reserve(self, keys: Sequence[int], slots: int) -> list[Span]:
        """Cells for one block of `slots` rows behind each session's rows; given back by `crop`."""
        spans = []
        for key in keys:
            held = self._sessions[key]
            used = held.length - held.first
            self._grow(held.pages, used + slots)
            spans.append(Span(slots, used, list(held.pages), held.length))
        return spans

    def crop(self, keys: Sequence[int]) -> None:
        """Drops the rows of the sessions' blocks: they come of placeholders and must not outlive their round."""
        for key in keys:
            held = self._sessions[key]
            keep = pages_for(held.length - held.first)
            self._release(held.pages[keep:])
            del held.pages[keep:]

    def check(self) -> None:
        """Asserts that every page is free or held once, and that sessions hold what they say; between rounds."""
        pages = [page for held in self._sessions.values() for page in held.pages]
        assert sorted([*pages, *self._free]) == list(range(self.num_pages)), "a page is lost or held twice"
        rows_held = [held.length - held.first for held in self._sessions.values()]
        assert self.tokens == sum(map(self.cost, rows_held)), "tokens are miscounted"
        for held in self._sessions.values():
            rows = held.length - held.first
            assert len(held.pages) == pages_for(rows), "page list of the wrong length"
            assert not self._window or rows < self._window - 1 + PAGE, "rows that nothing can read"

    def _grow(self, pages: list[int], cells: int) -> None:
        for _ in range(pages_for(cells) - len(pages)):
            pages.append(self._free.pop())

    def _release(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def pages_of(arch: DraftArch, capacity_tokens: int, max_sessions: int, block_size: int) -> int:
    """Pages of a DraftKV."""
    # A session wastes less than a page at its end, and at its beginning once rows have been dropped.
    spare = pages_for(block_size) + (2 if arch.window else 1)
    return pages_for(capacity_tokens) + max_sessions * spare


def pages_for(cells: int) -> int:
    """Pages that so many cells take."""
    return -(-cells // PAGE)
