"""Far more requests than pages, planned step by step without a model: all get through, and little is computed twice."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from services.verifier.draft import Draft
from services.verifier.paged_kv import PagePool
from services.verifier.planning import Part, PrefillBudget, plan_step
from services.verifier.request import Request
from services.verifier.roster import Roster
from tests.support.engine_harness import request

BUDGET, PREFILL, VOCAB = 512, 128, 1000


@dataclass
class Play:
    """What a run came to."""

    steps: int = 0
    rows: int = 0
    rejected: int = 0

    def step(self, roster: Roster, parts: list[Part], rng: random.Random, right: float) -> None:
        """Commits what was planned; each drafted token is right with that probability."""
        self.steps += 1
        for part in parts:
            it = part.request
            self.rows += len(part.work.tokens)
            if not part.work.samples:
                roster.commit(it, len(part.work.tokens))
                continue
            accepted = next((i for i in range(len(part.draft)) if rng.random() >= right), len(part.draft))
            self.rejected += len(part.draft) - accepted
            it.append([rng.randrange(VOCAB) for _ in range(accepted + 1)])
            roster.commit(it, it.pending - 1)
            if not it.remaining:
                roster.remove(it)


def advance(it: Request) -> int:
    return it.pages.committed + len(it.tokens)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize(
    ("prompt", "answer", "page_size", "fits"),
    [
        (48, 20, 4, 16),
        (8, 200, 16, 16),  # next to nothing at first, and then all want much
        (300, 300, 16, 2),
        (8, 60, 1, 16),
        (60, 60, 16, 1),
        (600, 40, 16, 16),
    ],
)
def test_64_requests(prompt: int, answer: int, page_size: int, fits: int, k: int, caching: bool) -> None:
    """Pages for `fits` of them. The oldest gets on in every step; a request gives way about once, not all the time."""
    rng = random.Random(0)
    pool = PagePool(fits * -(-(prompt + answer) // page_size), page_size)
    roster = Roster(pool, 64, caching)
    for i in range(64):
        roster.add(request(str(i), [rng.randrange(VOCAB) for _ in range(prompt)], answer))
    play = Play()
    while len(roster):
        roster.admit()
        oldest = roster.running[0]
        before = advance(oldest)
        drafts = {r.request_id: Draft([1] * min(k, r.remaining - 1)) for r in roster.running if r.decoding}
        parts = plan_step(roster, drafts, BUDGET, PrefillBudget(PREFILL))
        assert sum(len(part.work.tokens) for part in parts) <= BUDGET
        play.step(roster, parts, rng, 0.7)
        assert advance(oldest) > before or not oldest.remaining
        pool.check()
    assert pool.used == 0 and pool.available == pool.num_pages
    needed = 64 * (prompt + answer - 1)
    assert needed <= play.rows - play.rejected <= 1.6 * needed
    assert roster.preemptions <= 1.5 * 64
