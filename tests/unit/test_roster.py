"""Who runs, who waits, who gives way: first come first served, and the oldest always gets through."""

from __future__ import annotations

import random

import pytest

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
