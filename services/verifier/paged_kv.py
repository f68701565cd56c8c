"""Paged KV: who holds which page (adopt, reserve, commit, publish, free, check), and the tensors the pages index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.model.arch import Arch
from services.verifier.prefix import PrefixCache


@dataclass
class PageList:
    """One request's pages.

    pages[i] holds tokens [i * page_size, (i + 1) * page_size)
    |<-- published -->|                             whole pages, which others may hold too; never written again
    |<------ committed ------>|<---- reserved for this step's rows ---->|
    0                     committed                                 reserved
    """

    pages: list[int] = field(default_factory=list)
    committed: int = 0
    reserved: int = 0
    published: int = 0
    """Leading pages that can be found by their content."""


class PagePool:
    """Hands out pages. Pure bookkeeping: no tensor, no clock.

    Every page is one of: free; idle (nobody holds it, but its content can be found: free for whoever needs a page);
    held by one list or, if it is published, by several.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._rows = [""] * num_pages  # what made each page's feature rows; "" if nothing did, or not one thing alone
        self._lists: list[PageList] = []
        self._cache = PrefixCache()

    @property
    def used(self) -> int:
        """Pages held by requests."""
        return self.num_pages - self.available

    @property
    def available(self) -> int:
        """Pages that may be taken: free ones, and idle ones, whose content is then lost."""
        return len(self._free) + self._cache.idle

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def room(self, pages: PageList) -> int:
        """Tokens beyond the committed ones that could be reserved."""
        return (len(pages.pages) + self.available) * self.page_size - pages.committed

    def open(self) -> PageList:
        """A new, empty list."""
        pages = PageList()
        self._lists.append(pages)
        return pages

    def find(self, addresses: Sequence[bytes], rows: str = "") -> list[int]:
        """Pages of the longest run of `addresses` that is cached with feature rows of `rows` ("": with or without)."""
        return self._cache.find(addresses, rows)

    def idle_among(self, pages: Sequence[int]) -> int:
        """How many of `pages` nobody holds."""
        return sum(not self._holders[page] for page in pages)

    def adopt(self, pages: PageList, found: Sequence[int]) -> None:
        """Begins an empty list with pages just found; all their tokens are committed."""
        assert not pages.pages, "only an empty list can begin with found pages"
        for page in found:
            assert self._cache.addressed(page), "a page that was not found"
            self._cache.hold(page)
            self._holders[page] += 1
        pages.pages.extend(found)
        pages.committed = pages.reserved = len(found) * self.page_size
        pages.published = len(found)

    def reserve(self, pages: PageList, tokens: int) -> bool:
        """Makes room for `tokens` tokens beyond the committed ones; returns False, unchanged, if there is none."""
        end = pages.committed + tokens
        missing = self.pages_for(end) - len(pages.pages)
        if missing > self.available:
            return False
        for _ in range(missing):
            page = self._free.pop() if self._free else self._cache.evict()
            self._holders[page] = 1
            pages.pages.append(page)
        for page in pages.pages[pages.committed // self.page_size :]:
            assert self._holders[page] == 1 and not self._cache.addressed(page), "a page that others read is written"
        pages.reserved = max(pages.reserved, end)
        return True

    def commit(self, pages: PageList, tokens: int, rows: str = "") -> None:
        """The first `tokens` reserved tokens are valid, with feature rows made by `rows`; the rest is rolled back."""
        assert 0 <= tokens <= pages.reserved - pages.committed, "commit beyond the reservation"
        end = pages.committed + tokens
        for index in range(pages.committed // self.page_size, self.pages_for(end)):
            page = pages.pages[index]
            if index * self.page_size >= pages.committed:  # its first token is among these
                self._rows[page] = rows
            elif self._rows[page] != rows:
                self._rows[page] = ""
        pages.committed = end
        self.roll_back(pages)

    def rows_of(self, page: int) -> str:
        """Fingerprint of what made the feature rows of all the page's committed tokens; "" if no one thing did."""
        return self._rows[page]

    def forget_rows(self) -> None:
        """No page has feature rows any more."""
        self._rows = [""] * self.num_pages
        self._cache.forget_rows()

    def publish(self, pages: PageList, addresses: Sequence[bytes]) -> None:
        """Lets full committed pages be found by `addresses` (see prefix.extend)."""
        for index in range(pages.published, pages.committed // self.page_size):
            page = pages.pages[index]
            replaced = self._cache.add(page, addresses[index], self._rows[page])
            if replaced is not None:
                self._free.append(replaced)
            pages.published = index + 1

    def roll_back(self, pages: PageList) -> None:
        """Gives back what was reserved and not committed."""
        keep = self.pages_for(pages.committed)
        # The last page first: of a cached chain the deep end is to go before what it builds on.
        for page in reversed(pages.pages[keep:]):
            self._holders[page] -= 1
            if not self._holders[page] and not self._cache.release(page):
                self._free.append(page)
        del pages.pages[keep:]
        pages.reserved = pages.committed

    def free(self, pages: PageList) -> None:
        """Gives back everything and forgets the list; what was published stays until its place is needed."""
        pages.committed = pages.published = 0
        self.roll_back(pages)
        # By identity: equal lists are not the same list.
        self._lists = [other for other in self._lists if other is not pages]

    def check(self) -> None:
        """Asserts that every page is free, idle, or held as often as it is counted, and that lists are as they say."""
        holders = Counter(page for pages in self._lists for page in pages.pages)
        idle = self._cache.check(set(holders))
        assert sorted([*holders, *idle, *self._free]) == list(range(self.num_pages)), "a page is lost or owned twice"
        assert all(holders[page] == count for page, count in enumerate(self._holders)), "holders are miscounted"
        for pages in self._lists:
            assert len(set(pages.pages)) == len(pages.pages), "a page twice in one list"
            assert pages.published * self.page_size <= pages.committed <= pages.reserved, "beyond the reservation"
            assert len(pages.pages) == self.pages_for(pages.reserved), "page list of the wrong length"
            named = [self._cache.addressed(page) for page in pages.pages]
            assert named == [i < pages.published for i in range(len(named))], "a page is named that is not published"
            assert all(holders[page] == 1 for page in pages.pages[pages.published :]), "an unpublished page is shared"


def allocate_caches(
    arch: Arch, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | None = None
) -> list[Tensor]:
    """One zeroed cache a layer, [2 * Hkv * num_pages, page_size * d]: K of every KV head, then V of every KV head.

    Page-major within a head, so that a context is gathered by whole pages. Zeroed because padding reads pages that were
    never written, and 0 * NaN is NaN; the operating system maps zero pages only when they are touched.
    """
    shape = (2 * arch.num_kv_heads * num_pages, page_size * arch.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(arch.num_layers)]
