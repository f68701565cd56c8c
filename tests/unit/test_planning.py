"""What one step runs: decode rows first, drafts as far as there is room, then prompts; and who must leave the step."""

from __future__ import annotations

import math
import random

import pytest

from services.verifier.allocation import Policy
from services.verifier.draft import Draft
from services.verifier.paged_kv import PagePool
from services.verifier.planning import Part, PrefillBudget, plan_step, wants
from services.verifier.request import Request
from services.verifier.roster import Roster
from tests.support.engine_harness import request

PAGE = 4


class Scene:
    """A roster whose requests have KV for all but `pending` of their tokens."""

    def __init__(self, pages: int) -> None:
        self.roster = Roster(PagePool(pages, PAGE), 64)

    def add(self, name: str, prompt: int, produced: int = 0, pending: int = 1, **options: int) -> Request:
        it = request(
            name, range(prompt), options.pop("max_tokens", 50), committed=range(100, 100 + produced), **options
        )
        it.pages = self.roster.pool.open()
        assert self.roster.pool.reserve(it.pages, len(it.tokens) - pending)
        self.roster.pool.commit(it.pages, len(it.tokens) - pending)
        self.roster._by_id[name] = it
        self.roster.running.append(it)
        return it

    def plan(
        self, budget: int = 100, prefill: int = 1000, keys_per_row: float = math.inf, **drafts: list[int]
    ) -> dict[str, Part]:
        decoding = any(r.decoding for r in self.roster.running)
        made = {name: Draft(tokens) for name, tokens in drafts.items()}
        parts = plan_step(self.roster, made, budget, PrefillBudget(prefill, keys_per_row))
        assert not decoding or sum(len(part.work.tokens) for part in parts if not part.request.decoding) <= prefill
        assert sum(len(part.work.tokens) for part in parts) <= budget
        for part in parts:
            end = part.work.start + len(part.work.tokens)
            assert part.request in self.roster.running and part.request.pages.reserved >= end
            assert len(part.work.pages) * PAGE >= end
        self.roster.pool.check()
        return {part.request.request_id: part for part in parts}


def test_decode_rows_and_their_drafts() -> None:
    scene = Scene(40)
    scene.add("a", 5, produced=3)
    scene.add("b", 2, produced=1)
    parts = scene.plan(a=[7, 8])
    assert (parts["a"].work.tokens, parts["a"].work.start, parts["a"].work.samples) == ([102, 7, 8], 7, 3)
    assert (parts["a"].draft.token_ids, parts["a"].drafted) == ([7, 8], 2)
    assert (parts["b"].work.tokens, parts["b"].work.start, parts["b"].work.samples) == ([100], 2, 1)
    assert [law.position for law in parts["a"].trial.laws] == [8, 9, 10]


def test_prompts_come_in_chunks() -> None:
    scene = Scene(40)
    a = scene.add("a", 10, pending=10)
    part = scene.plan(budget=6)["a"]
    assert (part.work.tokens, part.work.start, part.work.samples, part.trial.laws) == (list(range(6)), 0, 0, [])
    scene.roster.pool.commit(a.pages, 6)
    part = scene.plan(budget=6)["a"]
    assert (part.work.tokens, part.work.start, part.work.samples) == ([6, 7, 8, 9], 6, 1)
    assert [law.position for law in part.trial.laws] == [10]


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    scene = Scene(4)
    a = scene.add("a", 1)
    assert not a.decoding and wants(scene.roster, Policy("fixed:7", 7)) == []
    assert scene.plan(a=[5])["a"].work.tokens == [0]


def test_recomputed_tokens_are_prefill() -> None:
    """After pre-emption prompt and output are computed again; only the last row gives a token."""
    scene = Scene(40)
    scene.add("a", 5, produced=4, pending=9)
    part = scene.plan()["a"]
    assert part.work.tokens == [0, 1, 2, 3, 4, 100, 101, 102, 103] and part.work.samples == 1


def test_decode_rows_go_before_prompts_and_drafts_share_what_is_left() -> None:
    scene = Scene(100)
    for name in "abc":
        scene.add(name, 4, produced=1)
    scene.add("p", 30, pending=30)
    parts = scene.plan(budget=20, a=[1] * 7, b=[1] * 2)
    assert {name: len(part.work.tokens) for name, part in parts.items()} == {"a": 8, "b": 3, "c": 1, "p": 8}
    parts = scene.plan(budget=8, a=[1] * 7, b=[1] * 7, c=[1] * 7)
    assert {name: len(part.draft) for name, part in parts.items()} == {"a": 1, "b": 1, "c": 1, "p": 0}
    assert [part.drafted for part in parts.values()] == [7, 7, 7, 0]
    assert len(parts["p"].work.tokens) == 2  # drafts leave prompts a quarter


def test_prompts_are_bounded_while_anybody_decodes() -> None:
    """They share the bound in order of admission; without decoders they share the step."""
    scene = Scene(100)
    for name, prompt in (("p", 5), ("q", 30), ("r", 30)):
        scene.add(name, prompt, pending=prompt)
    assert {n: len(p.work.tokens) for n, p in scene.plan(budget=40, prefill=8).items()} == {"p": 5, "q": 30, "r": 5}
    for r in scene.roster.running:
        scene.roster.pool.roll_back(r.pages)
    scene.add("a", 4, produced=1)
    assert {n: len(p.work.tokens) for n, p in scene.plan(budget=40, prefill=8).items()} == {"p": 5, "q": 3, "a": 1}


def test_rows_deep_in_a_prompt_are_dearer() -> None:
    """A row after 30 keys costs 1 + 30 / 10 = 4: a budget of 12 is 3 of them, or 2 there and 4 at a prompt's start."""
    scene = Scene(100)
    p = scene.add("p", 60, pending=30)
    scene.add("a", 4, produced=1)
    assert {n: len(part.work.tokens) for n, part in scene.plan(prefill=12, keys_per_row=10).items()} == {"p": 3, "a": 1}
    p.tokens[32:] = []  # 2 are left
    p.prompt_length = 32
    scene.roster.pool.roll_back(p.pages)
    scene.add("q", 20, pending=20)
    sizes = {n: len(part.work.tokens) for n, part in scene.plan(prefill=12, keys_per_row=10).items()}
    assert sizes == {"p": 2, "q": 4, "a": 1}
    scene.roster.pool.roll_back(p.pages)
    sizes = {n: len(part.work.tokens) for n, part in scene.plan(prefill=1, keys_per_row=10).items()}
    assert sizes == {"p": 1, "a": 1}  # however dear, one row


def test_drafts_leave_prompts_no_more_than_these_may_take() -> None:
    scene = Scene(100)
    scene.add("p", 60, pending=60)
    scene.add("a", 4, produced=1)
    parts = scene.plan(budget=40, prefill=2, a=[1] * 50)
    assert {name: len(part.work.tokens) for name, part in parts.items()} == {"p": 2, "a": 38}


def test_a_draft_is_cut_to_the_pages_that_are_free() -> None:
    scene = Scene(5)
    scene.add("a", 6, produced=2)  # 7 cells of 8 in use
    scene.add("b", 6, produced=2)
    parts = scene.plan(a=[1] * 7, b=[1])
    assert {name: (part.draft.token_ids, part.drafted) for name, part in parts.items()} == {
        "a": ([1] * 4, 7),
        "b": ([], 1),
    }
    assert len(scene.roster.running) == 2


def test_a_draft_takes_nothing_from_a_younger_one() -> None:
    """The last free page is for the row of the younger one, not for the draft of the older one."""
    scene = Scene(5)
    scene.add("a", 6, produced=2)  # 7 cells of 8 in use
    scene.add("b", 6, produced=3)  # 8 cells of 8: the next row needs a page
    parts = scene.plan(a=[1] * 3, b=[1] * 7)
    assert {name: len(part.draft) for name, part in parts.items()} == {"a": 0, "b": 3}
    assert scene.roster.preemptions == 0


def test_a_prompt_is_cut_to_the_pages_that_are_free() -> None:
    scene = Scene(6)
    scene.add("old", 20, pending=16)
    young = scene.add("young", 15, produced=1)
    parts = scene.plan(young=[1])
    assert {name: len(part.work.tokens) for name, part in parts.items()} == {"old": 4, "young": 1}
    assert young in scene.roster.running


def test_the_youngest_leaves_when_there_is_no_page_for_a_row() -> None:
    scene = Scene(4)
    scene.add("a", 6, produced=3)  # 8 cells of 8: the next row needs a page
    b = scene.add("b", 6, produced=2)
    assert list(scene.plan()) == ["a"] and list(scene.roster.waiting) == [b]


def test_a_prompt_older_than_who_decodes_takes_its_pages() -> None:
    """The young one had its row already; it leaves the step."""
    scene = Scene(5)
    scene.add("old", 20, pending=16)
    young = scene.add("young", 15, produced=1)
    assert list(scene.plan(young=[1])) == ["old"] and list(scene.roster.waiting) == [young]


def test_who_asks_for_drafts() -> None:
    scene = Scene(100)
    a = scene.add("a", 5, produced=3)
    scene.add("off", 5, produced=3, max_draft_tokens=0)
    b = scene.add("capped", 5, produced=3, max_draft_tokens=2)
    c = scene.add("ending", 5, produced=47)
    scene.add("last", 5, produced=49)
    scene.add("prefilling", 5, pending=5)
    assert wants(scene.roster, Policy("fixed:7", 7)) == [(a, 7), (b, 2), (c, 2)]
    assert wants(scene.roster, Policy()) == []


def random_scene(rng: random.Random) -> Scene:
    scene = Scene(rng.randint(8, 30))
    for i in range(rng.randint(1, 10)):
        prompt, produced = rng.randint(1, 12), rng.choice([0, rng.randint(1, 8)])
        pending = 1 if produced and rng.random() < 0.7 else rng.randint(1, prompt + produced)
        if scene.roster.pool.used + 6 > scene.roster.pool.num_pages:
            break
        scene.add(str(i), prompt, produced, pending)
    return scene


@pytest.mark.parametrize("seed", range(40))
def test_random_steps(seed: int) -> None:
    """Whatever is running: the oldest gets on, nothing is exceeded (see Scene.plan), drafts cost nobody a seat."""
    rng = random.Random(seed)
    scene, undrafted = random_scene(random.Random(seed)), random_scene(random.Random(seed))
    drafts = {r.request_id: [1] * rng.randint(0, 7) for r in scene.roster.running}
    oldest = scene.roster.running[0]
    budget, prefill = 8 * len(drafts) + rng.randint(1, 20), rng.randint(1, 20)
    parts = scene.plan(budget, prefill, **drafts)
    assert oldest.request_id in parts
    without = undrafted.plan(budget, prefill)
    # Fewer rows for prompts may need fewer pages, but drafts themselves take nobody's.
    assert without.keys() - {n for n, p in without.items() if not p.request.decoding} <= parts.keys()
