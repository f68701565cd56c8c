"""Pages through random lives against a naive model; the integrity check sees every planted fault."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from services.model.arch import Arch
from services.verifier.paged_kv import PageList, PagePool, allocate_caches


@dataclass
class Model:
    """What must be true of a pool, in counts of tokens only."""

    num_pages: int
    page_size: int
    committed: dict[int, int] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)

    def pages(self, tokens: int) -> int:
        return len(range(0, tokens, self.page_size))

    @property
    def used(self) -> int:
        return sum(self.pages(tokens) for tokens in self.reserved.values())

    def fits(self, key: int, tokens: int) -> bool:
        more = self.pages(self.committed[key] + tokens) - self.pages(self.reserved[key])
        return self.used + max(0, more) <= self.num_pages


def step(rng: random.Random, pool: PagePool, model: Model, lists: dict[int, PageList]) -> None:
    """One random operation on both."""
    if not lists or rng.random() < 0.1:
        key = max(lists, default=0) + 1
        lists[key], model.committed[key], model.reserved[key] = pool.open(), 0, 0
        return
    key = rng.choice(sorted(lists))
    pages = lists[key]
    match rng.choice(["reserve", "reserve", "commit", "commit", "roll back", "free"]):
        case "reserve":
            tokens = rng.choice([1, 2, 8, rng.randint(1, 40)])
            fits, before = model.fits(key, tokens), list(pages.pages)
            assert pool.reserve(pages, tokens) == fits
            if fits:
                model.reserved[key] = max(model.reserved[key], model.committed[key] + tokens)
                assert pages.pages[: len(before)] == before  # pages in use stay where they are
            else:
                assert pages.pages == before
        case "commit":
            tokens = rng.randint(0, model.reserved[key] - model.committed[key])
            kept = pages.pages[: model.pages(model.committed[key] + tokens)]
            pool.commit(pages, tokens)
            model.committed[key] += tokens
            model.reserved[key] = model.committed[key]
            assert pages.pages == kept
        case "roll back":
            pool.roll_back(pages)
            model.reserved[key] = model.committed[key]
        case "free":
            pool.free(pages)
            del lists[key], model.committed[key], model.reserved[key]


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 1), (4, 3), (20, 1), (16, 4), (7, 16)])
@pytest.mark.parametrize("seed", range(6))
def test_random_lives(num_pages: int, page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    pool, model = PagePool(num_pages, page_size), Model(num_pages, page_size)
    lists: dict[int, PageList] = {}
    for _ in range(400):
        step(rng, pool, model, lists)
        pool.check()
        assert pool.used == model.used
        for key, pages in lists.items():
            assert (pages.committed, pages.reserved) == (model.committed[key], model.reserved[key])
            assert len(pages.pages) == model.pages(model.reserved[key])
        owned = [page for pages in lists.values() for page in pages.pages]
        assert len(set(owned)) == len(owned) and set(owned) <= set(range(num_pages))
    for pages in lists.values():
        pool.free(pages)
    pool.check()
    assert pool.used == 0


def test_a_refused_reservation_changes_nothing() -> None:
    pool = PagePool(4, 2)
    first, second = pool.open(), pool.open()
    assert pool.reserve(first, 5) and pool.used == 3
    assert not pool.reserve(second, 3) and second == PageList()
    assert pool.reserve(second, 2) and pool.used == 4
    pool.commit(first, 1)
    assert pool.used == 2 and pool.reserve(second, 6)
    pool.check()


def test_equal_lists_are_freed_by_identity() -> None:
    pool = PagePool(4, 2)
    first, second = pool.open(), pool.open()
    assert first == second
    pool.free(second)
    assert pool.reserve(first, 2)
    pool.check()
    pool.free(first)
    assert pool.used == 0


def test_no_more_is_committed_than_was_reserved() -> None:
    pool = PagePool(4, 2)
    pages = pool.open()
    pool.reserve(pages, 3)
    for tokens in (4, -1):
        with pytest.raises(AssertionError, match="beyond the reservation"):
            pool.commit(pages, tokens)


FAULTS: dict[str, Callable[[PagePool, PageList, PageList], object]] = {
    "page lost by a list": lambda pool, a, b: a.pages.pop(),
    "page lost by the pool": lambda pool, a, b: pool._free.pop(),
    "page freed twice": lambda pool, a, b: pool._free.append(pool._free[0]),
    "page freed while owned": lambda pool, a, b: pool._free.append(a.pages[0]),
    "page in two lists": lambda pool, a, b: b.pages.append(a.pages[0]),
    "page twice in one list": lambda pool, a, b: a.pages.append(a.pages[0]),
    "list forgotten": lambda pool, a, b: pool._lists.remove(a),
    "page from nowhere": lambda pool, a, b: a.pages.append(99),
    "page kept past its tokens": lambda pool, a, b: a.pages.append(pool._free.pop()),
    "committed past the reservation": lambda pool, a, b: setattr(a, "committed", a.reserved + 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_sees(fault: str) -> None:
    pool = PagePool(8, 2)
    a, b = pool.open(), pool.open()
    assert pool.reserve(a, 5) and pool.reserve(b, 2)
    pool.commit(a, 4)
    pool.check()
    FAULTS[fault](pool, a, b)
    with pytest.raises(AssertionError):
        pool.check()


def test_caches_hold_every_page_of_every_head() -> None:
    arch = Arch("llama", 64, 96, 3, 4, 2, 16, 330, 512, 1e4, 1e-5, False, (), "float32")
    caches = allocate_caches(arch, 10, 4, torch.bfloat16)
    assert len(caches) == 3 and all(c.dtype == torch.bfloat16 and not c.any() for c in caches)
    assert caches[0].shape == (2 * 2 * 10, 4 * 16)
    assert sum(c.numel() * 2 for c in caches) == 10 * 4 * arch.kv_bytes_per_token(2)
