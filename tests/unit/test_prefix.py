"""Pages found by their content: always the right KV, never written again, the deep end of a chain given up first."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from services.verifier import prefix
from services.verifier.paged_kv import PageList, PagePool

PAGE = 3


def addresses(tokens: list[int], page_size: int = PAGE) -> list[bytes]:
    found: list[bytes] = []
    prefix.extend(found, tokens, page_size)
    return found


def filled(pool: PagePool, tokens: list[int], rows: str = "") -> PageList:
    """A list that begins with what is cached and computes the rest."""
    pages = pool.open()
    pool.adopt(pages, pool.find(addresses(tokens), rows))
    assert pool.reserve(pages, len(tokens) - pages.committed)
    pool.commit(pages, len(tokens) - pages.committed, rows)
    pool.publish(pages, addresses(tokens))
    pool.check()
    return pages


def cached(pool: PagePool, tokens: list[int], rows: str = "") -> int:
    return len(pool.find(addresses(tokens), rows))


def test_an_address_stands_for_all_tokens_before_its_end() -> None:
    a = addresses([1, 2, 3, 4, 5, 6, 7])
    assert len(a) == 2 and len(a[0]) >= 16
    assert addresses([1, 2, 3, 4, 5, 6])[:2] == a and addresses([1, 2]) == []
    others = [[1, 2, 3, 4, 5, 7], [2, 2, 3, 4, 5, 6], [4, 5, 6, 1, 2, 3], [1, 2, 3, 4, 5, 6 + 2**31]]
    assert len({addresses(tokens)[1] for tokens in [[1, 2, 3, 4, 5, 6], *others]}) == 5
    assert addresses([4, 5, 6])[0] != a[1]


def test_addresses_grow_with_the_tokens() -> None:
    """A page at a time or all at once: the same."""
    tokens = [random.Random(0).randrange(50_000) for _ in range(100)]
    grown: list[bytes] = []
    for length in range(101):
        prefix.extend(grown, tokens[:length], 7)
        assert len(grown) == length // 7
    assert grown == addresses(tokens, 7)


def test_kept_until_its_place_is_needed() -> None:
    pool = PagePool(4, PAGE)
    pool.free(filled(pool, [1] * 7))
    assert (pool.used, pool.available, cached(pool, [1] * 7)) == (0, 4, 2)
    pages = pool.open()
    assert pool.reserve(pages, 2 * PAGE)  # two pages were never used, or not full
    assert cached(pool, [1] * 7) == 2
    assert pool.reserve(pages, 3 * PAGE) and cached(pool, [1] * 7) == 1
    assert not pool.reserve(pages, 5 * PAGE) and cached(pool, [1] * 7) == 1  # refused: nothing changes
    assert pool.reserve(pages, 4 * PAGE) and cached(pool, [1] * 7) == 0
    pool.check()


def test_longest_unused_first_and_children_before_parents() -> None:
    pool = PagePool(6, PAGE)
    a, b = [1] * 3 * PAGE, [2] * 3 * PAGE
    pool.free(filled(pool, a))
    pool.free(filled(pool, b))
    pool.free(filled(pool, a[: 2 * PAGE]))  # used again, but for its last page
    left = []
    for _ in range(6):
        assert pool.reserve(pool.open(), 1)
        left.append((cached(pool, a), cached(pool, b)))
    assert left == [(2, 3), (2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]


def test_a_page_in_use_is_never_given_up() -> None:
    pool = PagePool(4, PAGE)
    a = filled(pool, [1] * 2 * PAGE)
    b = filled(pool, [1] * 2 * PAGE)
    assert a.pages == b.pages and pool.used == 2
    pool.free(a)
    assert pool.used == 2 and not pool.reserve(pool.open(), 3 * PAGE)
    assert cached(pool, [1] * 2 * PAGE) == 2
    pool.free(b)
    assert pool.used == 0 and pool.reserve(pool.open(), 3 * PAGE)
    pool.check()


def test_the_same_text_computed_twice_at_once() -> None:
    """Each keeps its copy while it runs; one stays afterwards, and its parent is not given up before it."""
    pool, text = PagePool(5, PAGE), [1] * 2 * PAGE
    a, b = pool.open(), pool.open()
    for pages, tokens in ((a, PAGE), (b, 2 * PAGE)):
        assert pool.reserve(pages, tokens)
        pool.commit(pages, tokens)
        pool.publish(pages, addresses(text))
    assert not set(a.pages) & set(b.pages) and pool.find(addresses(text)) == [a.pages[0], b.pages[1]]
    parent, child = a.pages[0], b.pages[1]
    pool.free(a)
    pool.free(b)
    pool.check()
    assert pool.find(addresses(text)) == [parent, child] and pool.used == 0
    assert pool.reserve(pool.open(), 4 * PAGE)
    assert pool.find(addresses(text)) == [parent]


def test_a_copy_takes_the_place_of_the_one_that_went() -> None:
    pool, text = PagePool(3, PAGE), [1] * PAGE
    a, b, c = pool.open(), pool.open(), pool.open()
    for pages in (a, b):
        assert pool.reserve(pages, PAGE)
        pool.commit(pages, PAGE)
        pool.publish(pages, addresses(text))
    pool.free(a)
    assert pool.reserve(c, 2 * PAGE) and cached(pool, text) == 0
    copy = list(b.pages)
    pool.free(b)
    assert pool.find(addresses(text)) == copy
    pool.check()


def test_rows_of_another_drafter_count_as_missing() -> None:
    pool, text = PagePool(8, PAGE), [1] * 2 * PAGE
    pool.free(filled(pool, text))
    assert (cached(pool, text), cached(pool, text, "x")) == (2, 0)
    pool.free(filled(pool, text, "x"))  # computed again, now with rows, in place of those without
    assert (cached(pool, text), cached(pool, text, "x"), cached(pool, text, "y")) == (2, 2, 0)
    assert pool.available == 8 and pool._cache.idle == 2
    pool.free(filled(pool, text))
    assert cached(pool, text, "x") == 2  # who needs no rows takes any
    held = filled(pool, text, "x")
    pool.free(filled(pool, text, "y"))
    assert (cached(pool, text, "x"), cached(pool, text, "y")) == (0, 2)
    pool.free(held)
    pool.check()
    assert pool._cache.idle == 2 and pool.used == 0


def test_rows_end_a_run_of_pages() -> None:
    pool, text = PagePool(8, PAGE), [1] * 3 * PAGE
    pool.free(filled(pool, text[:PAGE], "x"))
    pool.free(filled(pool, text))
    assert (cached(pool, text), cached(pool, text, "x")) == (3, 1)


def test_published_pages_are_not_written() -> None:
    pool = PagePool(4, PAGE)
    a = filled(pool, [1] * PAGE)
    a.committed -= 1  # as if its last row were to be computed again
    with pytest.raises(AssertionError, match="a page that others read is written"):
        pool.reserve(a, 1)


@dataclass
class Life:
    """A request: what it will say, its pages, and what its rows were computed with."""

    text: list[int]
    pages: PageList
    rows: str
    names: list[bytes] = field(default_factory=list)


class World:
    """Requests over one pool, and what each page really holds: for each slot, the text up to it."""

    def __init__(self, rng: random.Random, num_pages: int, page_size: int) -> None:
        self.rng, self.size = rng, page_size
        self.pool = PagePool(num_pages, page_size)
        self.kv: list[list[tuple[int, ...]]] = [[()] * page_size for _ in range(num_pages)]
        self.made = [[""] * page_size for _ in range(num_pages)]  # by slot, what made its feature row
        self.fingerprint = ""
        stems = [[rng.randrange(3) for _ in range(6 * page_size)] for _ in range(3)]
        self.texts = [stem[: rng.randrange(len(stem))] + [rng.randrange(9)] * rng.randint(1, 9) for stem in stems * 5]
        self.lives: list[Life] = []

    def begin(self) -> None:
        life = Life(self.rng.choice(self.texts), self.pool.open(), self.fingerprint)
        prefix.extend(life.names, life.text, self.size)
        found = self.pool.find(life.names[: (len(life.text) - 1) // self.size], life.rows)
        for index, page in enumerate(found):
            assert self.kv[page][-1] == tuple(life.text[: (index + 1) * self.size])
            assert not life.rows or self.made[page] == [life.rows] * self.size
        self.pool.adopt(life.pages, found)
        self.lives.append(life)

    def compute(self, life: Life) -> None:
        """Rows for some tokens, of which the last may be rejected."""
        start = life.pages.committed
        if start == len(life.text):
            return
        count = self.rng.randint(1, min(8, len(life.text) - start))
        if not self.pool.reserve(life.pages, count):
            return
        accepted = self.rng.randint(0, count)
        for at in range(start, start + count):
            right = tuple(life.text[: at + 1])
            self.kv[life.pages.pages[at // self.size]][at % self.size] = right if at < start + accepted else (-1,)
            self.made[life.pages.pages[at // self.size]][at % self.size] = self.fingerprint
        self.pool.commit(life.pages, accepted, self.fingerprint)
        self.pool.publish(life.pages, life.names)

    def check(self) -> None:
        self.pool.check()
        for life in self.lives:  # nobody wrote into what others read
            for at in range(life.pages.committed):
                assert self.kv[life.pages.pages[at // self.size]][at % self.size] == tuple(life.text[: at + 1])
        held = {page for life in self.lives for page in life.pages.pages}
        assert self.pool.used == len(held)
        reachable = {page for text in self.texts for page in self.pool.find(addresses(text, self.size))}
        assert set(self.pool._cache._idle) <= reachable, "a page outlived its parent"


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 2), (6, 3), (20, 1), (16, 4), (60, 2)])
@pytest.mark.parametrize("drafters", [[""], ["", "x", "y"]])
@pytest.mark.parametrize("seed", range(4))
def test_random_lives(num_pages: int, page_size: int, drafters: list[str], seed: int) -> None:
    rng = random.Random(seed)
    world, reused = World(rng, num_pages, page_size), 0
    for _ in range(500):
        if rng.random() < 0.02:
            world.fingerprint = rng.choice(drafters)
        if not world.lives or rng.random() < 0.1:
            world.begin()
            reused += world.lives[-1].pages.committed
        life = rng.choice(world.lives)
        world.compute(life)
        if rng.random() < (0.5 if life.pages.committed == len(life.text) else 0.03):
            world.pool.free(life.pages)
            world.lives.remove(life)
        world.check()
    assert reused > 0 or num_pages == 1
    for life in world.lives:
        world.pool.free(life.pages)
    world.pool.check()
    assert world.pool.used == 0 and world.pool.available == num_pages
