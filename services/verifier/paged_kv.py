"""Paged KV: who owns which page (reserve, commit, roll back, free, check), and the tensors the pages index."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.model.arch import Arch


@dataclass
class PageList:
    """One request's pages.

    pages[i] holds tokens [i * page_size, (i + 1) * page_size)
    |<---- committed ---->|<---- reserved for this step's rows ---->|
    0                 committed                              reserved
    """

    pages: list[int] = field(default_factory=list)
    committed: int = 0
    reserved: int = 0


class PagePool:
    """Hands out pages. Pure bookkeeping: no tensor, no clock; every page is free or in exactly one PageList."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._lists: list[PageList] = []

    @property
    def used(self) -> int:
        """Pages owned by requests."""
        return self.num_pages - len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def open(self) -> PageList:
        """A new, empty list."""
        pages = PageList()
        self._lists.append(pages)
        return pages

    def reserve(self, pages: PageList, tokens: int) -> bool:
        """Makes room for `tokens` tokens beyond the committed ones; returns False, unchanged, if there is none."""
        end = pages.committed + tokens
        missing = self.pages_for(end) - len(pages.pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            pages.pages.append(self._free.pop())
        pages.reserved = max(pages.reserved, end)
        return True

    def commit(self, pages: PageList, tokens: int) -> None:
        """The first `tokens` reserved tokens are valid; the rest is rolled back."""
        assert 0 <= tokens <= pages.reserved - pages.committed, "commit beyond the reservation"
        pages.committed += tokens
        self.roll_back(pages)

    def roll_back(self, pages: PageList) -> None:
        """Gives back what was reserved and not committed."""
        keep = self.pages_for(pages.committed)
        self._free.extend(reversed(pages.pages[keep:]))
        del pages.pages[keep:]
        pages.reserved = pages.committed

    def free(self, pages: PageList) -> None:
        """Gives back everything and forgets the list."""
        pages.committed = 0
        self.roll_back(pages)
        # By identity: equal lists are not the same list.
        self._lists = [other for other in self._lists if other is not pages]

    def check(self) -> None:
        """Asserts that every page is free or owned exactly once, and that lists are as long as they say."""
        owned = [page for pages in self._lists for page in pages.pages]
        assert sorted(owned + self._free) == list(range(self.num_pages)), "a page is lost or owned twice"
        for pages in self._lists:
            assert pages.committed <= pages.reserved, "committed beyond the reservation"
            assert len(pages.pages) == self.pages_for(pages.reserved), "page list of the wrong length"


def allocate_caches(arch: Arch, num_pages: int, page_size: int, dtype: torch.dtype) -> list[Tensor]:
    """One zeroed cache a layer, [2 * Hkv * num_pages, page_size * d]: K of every KV head, then V of every KV head.

    Page-major within a head, so that a context is gathered by whole pages. Zeroed because padding reads pages that were
    never written, and 0 * NaN is NaN; the operating system maps zero pages only when they are touched.
    """
    shape = (2 * arch.num_kv_heads * num_pages, page_size * arch.head_dim)
    return [torch.zeros(shape, dtype=dtype) for _ in range(arch.num_layers)]
