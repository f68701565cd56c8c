"""Who runs, who waits, who gives way: first come first served, and the oldest always gets through."""

from __future__ import annotations

import random

import pytest

from services.verifier import prefix
from services.verifier.paged_kv import PagePool
from services.verifier.request import Request, Sampling
from services.verifier.roster import Roster

PAGE = 4


def request(name: str, prompt: int, max_tokens: int = 8) -> Request:
    sampling = Sampling(0.0, 1.0, 0, 0, max_tokens, frozenset(), None)
    return Request(name, 0, "owner", prompt, [1] * prompt, sampling)


def roster(pages: int, seats: int = 8, *requests: Request, prefix_caching: bool = False) -> Roster:
    it = Roster(PagePool(pages, PAGE), seats, prefix_caching)
    for r in requests:
        it.add(r)
    return it


def names(requests: object) -> list[str]:
    return [r.request_id for r in requests]  # type: ignore[attr-defined]


def prefill(it: Roster, r: Request) -> None:
    """All of the prompt has KV, and the first token is there."""
    assert it.reserve(r, r.pending) == r.pending
    it.commit(r, r.pending)
    r.tokens.append(1)


def running(pages: int, *requests: Request, prefix_caching: bool = False) -> Roster:
    """A roster where all of them run and have their first token, admitted or not."""
    it = roster(pages, 8, *requests, prefix_caching=prefix_caching)
    for r in requests:
        it.waiting.remove(r)
        it.running.append(r)
        r.pages = it.pool.open()
        prefill(it, r)
    return it


def test_seats_bound_the_running() -> None:
    it = roster(100, 2, *(request(n, 4) for n in "abc"))
    assert names(it.admit()) == ["a", "b"] and names(it.running) == ["a", "b"] and names(it.waiting) == ["c"]
    assert it.admit() == []
    it.remove(it.running[0])
    assert names(it.admit()) == ["c"] and names(it.running) == ["b", "c"] and len(it) == 2


def test_pages_bound_the_admitted() -> None:
    """Who runs counts with the pages it will want soon, whether it has them yet or not; a newcomer with its own."""
    it = roster(6, 8, request("a", 7), request("b", 7), request("c", 3))
    assert names(it.admit()) == ["a", "b"]  # a: 7 tokens, the next, and a page's worth: 3 pages; b: 2, then 3
    assert it.pool.used == 0 and names(it.waiting) == ["c"]
    prefill(it, it.running[0])
    assert it.admit() == []
    it.remove(it.running[1])
    assert names(it.admit()) == ["c"]


def test_nobody_runs_only_to_give_way_at_once() -> None:
    """There is room for both prompts and a token each, but not for what the first will want next."""
    it = roster(4, 8, request("a", 7), request("b", 7))
    assert names(it.admit()) == ["a"]
    it = roster(4, 8, request("a", 7, 1), request("b", 7))  # it will want nothing
    assert names(it.admit()) == ["a", "b"]


def test_nobody_overtakes() -> None:
    it = roster(4, 8, request("a", 8), request("big", 12), request("small", 1))
    assert names(it.admit()) == ["a"] and names(it.waiting) == ["big", "small"]


def test_alone_anybody_is_admitted() -> None:
    """A request that fills the pool to the last cell has no room to grow in reserve, and runs all the same."""
    it = roster(4, 8, request("a", 15, 1))
    assert names(it.admit()) == ["a"]
    it = roster(4, 8, request("b", 16, 1))
    assert names(it.admit()) == ["b"] and it.reserve(it.running[0], 16)


def test_the_youngest_gives_way() -> None:
    it = running(6, *(request(n, 7) for n in "abc"))
    a, b, c = it.running
    assert it.pool.used == 6
    assert it.reserve(a, 3) == 1 and it.preemptions == 0  # 8 cells: nobody gives way to more than a first token
    it.commit(a, 1)
    a.tokens.append(1)
    assert it.reserve(a, 3) == 3
    assert names(it.running) == ["a", "b"] and names(it.waiting) == ["c"] and it.preemptions == 1
    assert c.pages.pages == [] and c.pending == 8 and len(c.tokens) == 8  # what it said stays said
    assert it.find("c") is c and len(it) == 3
    assert it.reserve(b, 1) == 1
    it.pool.check()


def test_the_youngest_itself_gives_way() -> None:
    it = running(4, *(request(n, 8) for n in "ab"))
    b = it.running[1]
    assert it.reserve(b, 2) == 0 and names(it.running) == ["a"] and names(it.waiting) == ["b"]
    it.pool.check()


def test_who_gave_way_comes_back_first() -> None:
    it = running(4, *(request(n, 8) for n in "ab"))
    it.add(request("c", 7))
    a = it.running[0]
    assert it.reserve(a, 9) == 8
    assert names(it.waiting) == ["b", "c"]
    it.remove(a)
    assert names(it.admit()) == ["b"] and names(it.waiting) == ["c"]


def test_a_request_that_cannot_fit_alone_is_our_bug() -> None:
    it = running(2, request("a", 8))
    with pytest.raises(AssertionError, match="does not fit alone"):
        it.reserve(it.running[0], 1)


def test_removal_frees_waiting_and_running() -> None:
    it = roster(4, 1, request("a", 7), request("b", 3))
    (a,) = it.admit()
    prefill(it, a)
    it.remove(it.waiting[0])
    assert it.find("b") is None and len(it) == 1
    it.remove(a)
    assert len(it) == 0 and it.pool.used == 0 and not it.running
    it.pool.check()
    it.add(request("a", 1))  # the name is free again
    with pytest.raises(AssertionError, match="two requests of one id"):
        it.add(request("a", 1))


def text(name: str, tokens: list[int], max_tokens: int = 8) -> Request:
    """A request of which the tokens matter."""
    it = request(name, len(tokens), max_tokens)
    it.tokens = list(tokens)
    return it


SHARED = [1] * 2 * PAGE


def test_who_comes_later_begins_with_what_is_cached() -> None:
    it = running(20, text("a", [*SHARED, 2]), prefix_caching=True)
    it.add(text("b", [*SHARED, 3, 3]))
    it.add(text("c", [3, *SHARED]))
    b, c = it.admit()
    assert (b.pages.committed, b.cached_tokens, b.pending) == (8, 8, 2)
    assert (c.pages.committed, c.cached_tokens) == (0, 0)
    assert (it.looked_up, it.reused) == (10 + 9, 8)  # a was admitted by hand
    it.pool.check()


def test_one_token_is_left_to_compute() -> None:
    it = running(20, text("a", SHARED), prefix_caching=True)
    it.add(text("b", SHARED))
    it.add(text("c", [*SHARED, 1]))
    b, c = it.admit()
    assert (b.pages.committed, b.pending) == (4, 4) and (c.pages.committed, c.pending) == (8, 1)
    assert not b.decoding and not c.decoding


def test_cached_pages_that_nobody_holds_count_when_they_are_taken() -> None:
    it = running(7, text("a", [*SHARED, 2]), prefix_caching=True)
    it.remove(it.running[0])
    assert it.pool.used == 0 and it.pool.available == 7
    it.add(text("b", [5] * 15))
    it.add(text("c", [*SHARED, 2, 3]))
    assert names(it.admit()) == ["b"]  # 4 pages and one to grow; c's are 3, cached or not
    it.remove(it.running[0])
    assert names(it.admit()) == ["c"] and it.pool.used == 2


def test_shared_pages_count_once() -> None:
    """Five requests of three pages each on seven."""
    it = running(7, text("a", [*SHARED, 2], 1), prefix_caching=True)
    for name in "bcde":
        it.add(text(name, [*SHARED, 3], 2))
    assert names(it.admit()) == ["b", "c", "d", "e"]
    for r in it.running[1:]:
        prefill(it, r)
    assert it.pool.used == 7 and it.preemptions == 0
    it.pool.check()


def test_the_same_prefix_is_computed_once() -> None:
    """Who would compute the same pages at the same time waits for them; who would not passes."""
    it = roster(40, 8, text("a", [*SHARED, 2]), text("b", [*SHARED, 3]), text("c", [4] * 9), prefix_caching=True)
    a, c = it.admit()
    assert names([a, c]) == ["a", "c"] and names(it.waiting) == ["b"]
    assert it.reserve(a, 6) == 6
    it.commit(a, 6)
    assert it.admit() == []
    assert it.reserve(a, 2) == 2
    it.commit(a, 2)  # a still prefills, but what b needs is there
    (b,) = it.admit()
    assert b.pages.committed == 8 and b.cached_tokens == 8


def test_nobody_waits_for_a_page_that_is_not_its_next() -> None:
    it = roster(40, 8, text("a", [1] * 12), text("b", [2] * 4 + [1] * 8), text("c", [1] * 3), prefix_caching=True)
    assert names(it.admit()) == ["a", "b", "c"]


@pytest.mark.parametrize("leave", ["removed", "pre-empted"])
def test_nobody_waits_for_one_that_left(leave: str) -> None:
    it = roster(40, 8, text("o", [7] * 5), text("a", [*SHARED, 2]), text("b", [*SHARED, 3]), prefix_caching=True)
    a = it.admit()[1]
    assert it.reserve(a, 4) == 4
    it.commit(a, 4)
    if leave == "removed":
        it.remove(a)
        (b,) = it.admit()
        assert b.request_id == "b" and b.pages.committed == 4
    else:
        it._preempt(a)
        assert names(it.admit()) == ["a"] and a.pages.committed == 4 and names(it.waiting) == ["b"]


def test_nobody_waits_for_who_decodes() -> None:
    """The newest token of "a" ends a page that has yet to be computed; that is no prefill to wait for."""
    it = running(40, text("a", [*SHARED, 2, 2, 2]), prefix_caching=True)
    prefix.extend(it.running[0].addresses, it.running[0].tokens, PAGE)
    it.add(text("b", [*SHARED, 2, 2, 2, 1, 5]))
    assert names(it.admit()) == ["b"]


def test_seats_are_kept_for_who_waits_for_a_page() -> None:
    it = roster(40, 3, *(text(n, [*SHARED, 2]) for n in "abc"), *(text(n, [9, 9]) for n in "de"), prefix_caching=True)
    assert names(it.admit()) == ["a"] and names(it.waiting) == ["b", "c", "d", "e"]
    prefill(it, it.running[0])
    assert names(it.admit()) == ["b", "c"]


def test_who_gave_way_finds_its_pages_again() -> None:
    it = running(8, text("old", [5] * 8), text("a", [*SHARED, 2, 2], 30), prefix_caching=True)
    a = it.running[1]
    a.cached_tokens = 0  # as when it was first admitted
    it._preempt(a)
    assert it.admit() == [a] and a.pages.committed == 8 and a.cached_tokens == 0
    assert (it.looked_up, it.reused) == (0, 0)  # its own pages are no news
    it.pool.check()


def test_answers_are_cached_too() -> None:
    """The next turn of a talk begins with the last one's prompt and answer."""
    it = running(20, text("a", [1] * 6), prefix_caching=True)
    a = it.running[0]
    for token in (2, 3, 4):
        assert it.reserve(a, 1) == 1
        it.commit(a, 1)
        a.tokens.append(token)
    said = list(a.tokens)
    it.remove(a)
    it.add(text("b", [*said, 9, 9]))
    assert it.admit()[0].cached_tokens == 8


def test_without_caching_nothing_is_kept() -> None:
    it = running(20, text("a", [*SHARED, 2]))
    it.add(text("b", [*SHARED, 2]))
    (b,) = it.admit()
    assert (b.cached_tokens, b.pages.committed, it.looked_up, it.reused) == (0, 0, 0, 0)


def test_outstanding_tokens() -> None:
    a, b = request("a", 7, 5), request("b", 3, 2)
    it = roster(8, 1, a, b)
    assert it.outstanding_tokens == 7 + 5 + 3 + 2
    it.admit()
    prefill(it, a)
    assert it.outstanding_tokens == 1 + 4 + 3 + 2


@pytest.mark.parametrize("seed", range(10))
def test_everybody_gets_through(seed: int) -> None:
    """Random requests over a small pool: every step the oldest commits a token, so the work ends."""
    rng = random.Random(seed)
    pages = rng.randint(4, 12)
    it = roster(pages, rng.randint(1, 6))
    for i in range(20):
        prompt = rng.randint(1, pages * PAGE - 1)
        it.add(request(str(i), prompt, rng.randint(1, pages * PAGE - prompt)))
    finished: list[str] = []
    for _ in range(20 * pages * PAGE):
        if not len(it):
            break
        it.admit()
        assert it.running, "nobody runs"
        oldest = it.running[0]
        before = len(oldest.tokens) + oldest.pages.committed
        for r in list(it.running):
            if r not in it.running or not (count := it.reserve(r, r.pending)):
                continue
            it.commit(r, count)
            it.pool.check()
            if r.pending:
                continue
            r.tokens.append(1)
            if r.remaining == 0:
                it.remove(r)
                finished.append(r.request_id)
        assert len(oldest.tokens) + oldest.pages.committed > before or not oldest.remaining, "the oldest did not get on"
    assert len(it) == 0 and len(finished) == 20 and it.pool.used == 0
