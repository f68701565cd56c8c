"""Content addresses of full KV pages: which page holds the KV of which tokens, and which is given up first."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_DIGEST_BYTES = 32  # no two texts share an address by chance, nor because somebody looked for such a pair


def extend(addresses: list[bytes], tokens: Sequence[int], page_size: int) -> None:
    """Appends the addresses of those full pages of `tokens` that `addresses` does not have yet.

    A page's address is a hash of its parent's address and its own token ids, so it stands for all tokens up to its
    end, as KV does (as in vLLM's automatic prefix caching).
    """
    for start in range(len(addresses) * page_size, len(tokens) - page_size + 1, page_size):
        parent = addresses[-1] if addresses else b""
        ids = array("q", tokens[start : start + page_size]).tobytes()
        addresses.append(hashlib.blake2b(parent + ids, digest_size=_DIGEST_BYTES).digest())


class PrefixCache:
    """Which full page has which address. Knows of a page only whether somebody holds it; PagePool counts who.

    Of several pages of one address one is found; the others end with who holds them. Pages that nobody holds are idle:
    they stay until their place is needed, the longest unused first. A page's parent is never given up before it,
    because whoever lets pages go lets the last one go first.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, int] = {}  # the page that is found, by address
        self._address: dict[int, bytes] = {}  # of every full page, also of those that are not found
        self._rows: dict[int, str] = {}  # fingerprint of what made the page's feature rows, "" without rows
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def idle(self) -> int:
        """Pages that are found and that nobody holds."""
        return len(self._idle)

    def find(self, addresses: Iterable[bytes], rows: str = "") -> list[int]:
        """Pages of the longest known run of `addresses`.

        A page whose feature rows were made by anything but `rows`, or that has none, counts as missing; "" asks for
        no rows.
        """
        pages = []
        for address in addresses:
            page = self._found.get(address)
            if page is None or (rows and self._rows[page] != rows):
                break
            pages.append(page)
        return pages

    def add(self, page: int, address: bytes, rows: str = "") -> int | None:
        """Names a full page that is held. Returns the idle page it takes the place of, if any: that one is free then.

        The page found first stays the one, unless the new one has other feature rows: those of today's drafter.
        """
        assert page not in self._address, "a page with two addresses"
        self._address[page], self._rows[page] = address, rows
        known = self._found.get(address)
        if known is not None and rows in ("", self._rows[known]):
            return None
        self._found[address] = page
        if known is None or known not in self._idle:
            return None  # there was none, or somebody still holds it
        self._forget(known)
        return known

    def hold(self, page: int) -> None:
        """Somebody holds the page again."""
        self._idle.pop(page, None)

    def release(self, page: int) -> bool:
        """Nobody holds the page any more. True if it stays, idle; False if it is free then."""
        address = self._address.get(page)
        if address is None:
            return False
        found = self._found.setdefault(address, page)
        if found == page:
            self._idle[page] = None
            return True
        self._forget(page)
        if found in self._idle:  # used until now by way of its copy; else it would go before pages that build on it
            self._idle.move_to_end(found)
        return False

    def evict(self) -> int:
        """Gives up the idle page that was unused longest."""
        page = next(iter(self._idle))
        del self._found[self._address[page]]
        self._forget(page)
        return page

    def forget_rows(self) -> None:
        """No page has feature rows any more."""
        self._rows = dict.fromkeys(self._rows, "")

    def addressed(self, page: int) -> bool:
        """Whether the page is full and named, so that nobody may write to it."""
        return page in self._address

    def check(self, held: set[int]) -> set[int]:
        """Asserts that every named page is held or idle, not both, and that idle ones are found; returns the idle."""
        idle = set(self._idle)
        assert not idle & held, "an idle page is held"
        assert set(self._address) <= idle | held, "a named page is neither held nor idle"
        assert set(self._rows) == set(self._address), "a page with an address without rows, or the reverse"
        for address, page in self._found.items():
            assert self._address.get(page) == address, "a page is found under another address"
        assert idle <= set(self._found.values()), "an idle page cannot be found"
        return idle

    def _forget(self, page: int) -> None:
        del self._address[page], self._rows[page]
        self._idle.pop(page, None)
