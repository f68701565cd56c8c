"""Reused KV changes no id: shared prefixes, replays, pre-emption, few pages, drafts; and it does save the rows."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from services.verifier.planning import PrefillBudget
from services.verifier.request import FinishReason, Request
from services.verifier.target import Target
from tests.support.engine_harness import Answer, request
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.stepping import Stepping
from tests.support.tiny_llama import TinyLlama

VOCAB, PAGE, COUNT = 330, 8, 12


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


@pytest.fixture(scope="module")
def target(tiny_llama: TinyLlama) -> Target:
    return Target(tiny_llama.folder, "float32")


class Truth:
    """Prompts by name, and what transformers says after each."""

    def __init__(self, llama: TinyLlama) -> None:
        self.llama = llama
        self.prompts: dict[str, list[int]] = {}
        self._said = cache(lambda prompt, count: llama.generate(list(prompt), count))

    def request(self, name: str, prompt: list[int], count: int = COUNT, **options: Any) -> Request:
        self.prompts[name] = prompt
        return request(name, prompt, count, **options)

    def said(self, name: str, count: int = COUNT) -> list[int]:
        return self._said(tuple(self.prompts[name]), count)

    def drafter(self, k: int) -> ScriptedDrafter | None:
        """Drafts mostly the truth."""
        rng = random.Random(k)

        def propose(name: str, tokens: list[int], most: int) -> list[int]:
            told = (self.prompts[name] + self.said(name, 40))[len(tokens) :][:most]
            return [t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in told]

        return ScriptedDrafter(propose) if k else None

    def compare(self, answers: dict[str, Answer], count: int = COUNT) -> None:
        for name, answer in answers.items():
            self.llama.assert_same(self.prompts[name], answer.tokens, self.said(name, count))
            assert answer.terminal is not None and answer.terminal.reason == FinishReason.LENGTH


@pytest.fixture(scope="module")
def truth(tiny_llama: TinyLlama) -> Truth:
    return Truth(tiny_llama)


def engine(target: Target, truth: Truth, k: int = 0, **options: Any) -> Stepping:
    return Stepping(target, k=k, drafter=truth.drafter(k), **{"page_size": PAGE, "max_model_len": 1024, **options})


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


STEM = ids(70, 1)
PROMPTS = {
    "page-aligned": STEM[:64] + ids(5, 2),
    "odd length": STEM[:51] + ids(5, 3),
    "the same": STEM,
    "the same, whole pages": STEM[:64],
    "one token more": STEM[:65],
    "shorter than a page": STEM[:5],
    "exactly a page": STEM[:8],
    "longer": STEM + ids(60, 4),
    "something else": ids(40, 5),
    "one token": STEM[:1],
}


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("k", [0, 3, 7])
def test_shared_prefixes(target: Target, truth: Truth, k: int, at_once: bool) -> None:
    """Ids are those of transformers, and what is reused is what is shared, in whole pages, less the last token."""
    it = engine(target, truth, k)
    truth.compare(it.play(truth.request("stem", STEM)))
    work = [truth.request(name, prompt) for name, prompt in PROMPTS.items()]
    for some in [work] if at_once else [[r] for r in work]:
        truth.compare(it.play(*some))
    for name, prompt in PROMPTS.items():
        shared = min(common(prompt, STEM + truth.said("stem")), len(prompt) - 1)
        assert it.cached(name) == shared // PAGE * PAGE, name
    stats = it.engine.load().stats
    prompts = sum(map(len, PROMPTS.values()))
    reused = sum(map(it.cached, PROMPTS))
    assert (stats.prefix_queries, stats.prefix_hits) == (prompts + len(STEM), reused)
    assert stats.prompt_tokens == prompts + len(STEM) - reused
    assert stats.verified > 0 or k == 0


@pytest.mark.parametrize("k", [0, 7])
def test_without_caching_nothing_is_reused(target: Target, truth: Truth, k: int) -> None:
    it = engine(target, truth, k, prefix_caching=False)
    for name in ("the same", "longer"):
        truth.compare(it.play(truth.request(name, PROMPTS[name])))
    assert it.cached("longer") == 0 and it.engine.load().stats.prefix_queries == 0


@pytest.mark.parametrize("k", [0, 3])
def test_the_next_turn(target: Target, truth: Truth, k: int) -> None:
    """Prompt, answer and more: all of the first turn but its open page is there."""
    it = engine(target, truth, k)
    prompt = STEM[:20]
    truth.compare(it.play(truth.request("turn", prompt)))
    for name, more, cached in (("whole pages", 0, 24), ("more", 3, 32)):
        # 32 tokens were said, and the last of them has no KV until "whole pages" computes it.
        truth.compare(it.play(truth.request(name, prompt + truth.said("turn") + ids(more, 9))))
        assert it.cached(name) == cached


def test_a_replay_finds_its_own_tokens(target: Target, truth: Truth) -> None:
    it = engine(target, truth)
    it.play(truth.request("a", STEM))
    said = truth.said("a")
    answer = it.play(truth.request("b", STEM, committed=said[:5], attempt=1))["b"]
    assert said[:5] + answer.tokens == said and it.cached("b") == 70  # of 72 found, what is prompt
    assert answer.updates[0].decode_step is False


@pytest.mark.parametrize("k", [0, 7])
def test_the_same_prompt_many_times_is_computed_once(target: Target, truth: Truth, k: int) -> None:
    """As n answers of one request: one computes it, the others wait for that and begin behind it."""
    it = engine(target, truth, k, max_num_batched_tokens=32)
    truth.compare(it.play(*(truth.request(f"n{i}", STEM) for i in range(8))))
    assert [it.cached(f"n{i}") for i in range(8)] == [0] + [64] * 7
    assert it.engine.load().stats.prompt_tokens == 70 + 7 * 6


@pytest.mark.parametrize("prefix", [600, 603])
def test_prefill_of_a_shared_prefix_is_saved(target: Target, truth: Truth, prefix: int) -> None:
    it = engine(target, truth)
    start = ids(prefix, 6)
    prompts = [start + ids(30, 100 + i) for i in range(2)]
    rows = []
    for i, prompt in enumerate(prompts):
        before = sum(it.rows)
        truth.compare(it.play(truth.request(f"long {prefix} {i}", prompt)))
        rows.append(sum(it.rows) - before)
    assert rows[0] == prefix + 30 + COUNT - 1
    assert rows[0] - rows[1] == it.cached(f"long {prefix} 1") >= 0.9 * prefix


def test_cancelled_while_others_read(target: Target, truth: Truth) -> None:
    """Who computed the prefix ends; who shares its pages goes on; who waits for the next page computes it itself."""
    it = engine(target, truth, prefill=PrefillBudget(16))
    it.submit(truth.request("first", STEM[:33]))
    it.until(lambda: bool(it.answers.get("first")))
    it.submit(truth.request("long", STEM), truth.request("reader", STEM[:33] + ids(4, 7)))
    it.step()
    it.submit(truth.request("waits", STEM + ids(3, 8)))
    it.step()
    assert "waits" in [r.request_id for r in it.engine._roster.waiting]
    for name in ("first", "long"):
        it.engine.stop(name, 0)
    it.step()
    assert not it.engine._roster.waiting
    it.until(lambda: not it.engine.busy)
    it.engine._idle()
    truth.compare({name: it.answers[name] for name in ("reader", "waits")})
    assert it.cached("reader") == 32 and 32 < it.cached("waits") < 70


@pytest.mark.parametrize("k", [0, 3])
def test_pages_are_given_up_under_readers(target: Target, truth: Truth, k: int) -> None:
    """A small pool, old prefixes given up for new ones all the time, while others read theirs."""
    it = engine(target, truth, k, num_pages=24, page_size=4, max_model_len=96, max_num_seqs=6)
    stems = [ids(30, seed) for seed in range(20, 24)]
    rng = random.Random(0)
    work = [
        truth.request(f"few {i}", rng.choice(stems)[: rng.choice([4, 17, 28, 30])] + ids(rng.randint(0, 5), i))
        for i in range(40)
    ]
    truth.compare(it.play(*work))
    hits = it.engine.load().stats.prefix_hits
    assert 0 < hits < sum(len(r.tokens) for r in work)


@pytest.mark.parametrize(("k", "shared"), [(0, 0), (7, 0), (0, 37), (3, 37)])
def test_64_streams_on_pages_for_16(target: Target, truth: Truth, k: int, shared: int) -> None:
    """All complete with the ids they would have alone, and without computing much twice."""
    count, size = 20, 4
    pages = 16 * -(-(48 + count) // size)
    it = engine(target, truth, k, num_pages=pages, page_size=size, max_num_seqs=64, max_model_len=96)
    work = [truth.request(f"s{shared} {i}", STEM[:shared] + ids(48 - shared, 200 + i), count) for i in range(64)]
    answers = it.play(*work)
    truth.compare(answers, count)
    stats = it.engine.load().stats
    assert max(report.load.running for report in it.reports) >= 16
    rejected = stats.verified - stats.accepted
    needed = 64 * (48 + count - 1) - 63 * (shared // size * size)
    assert needed <= sum(it.rows) - rejected <= 1.25 * needed
    assert stats.preemptions > 0


def test_long_prompts_leave_room_for_those_who_decode(target: Target, truth: Truth) -> None:
    """While anybody decodes, a step has at most so many prompt rows, and everybody who decodes moves in it."""
    it = engine(target, truth, prefill=PrefillBudget(24), max_num_batched_tokens=256)
    streams = [truth.request(f"stream {i}", ids(10, 300 + i), 40) for i in range(4)]
    it.submit(*streams)
    it.until(lambda: len(it.answers) == 4)
    first = len(it.reports)
    it.submit(truth.request("long", ids(500, 310), 5))
    it.until(lambda: "long" in it.answers)
    steps = it.reports[first:]
    assert len(steps) == -(-500 // 24)
    for report in steps:
        decoded = sum(update.decode_step for update in report.updates)
        assert decoded == 4 and report.rows - decoded <= 24
    it.until(lambda: not it.engine.busy)
    truth.compare({r.request_id: it.answers[r.request_id] for r in streams}, 40)
    alone = len(it.reports)
    it.play(truth.request("alone", ids(500, 311), 5))
    assert [report.rows for report in it.reports[alone:]][:2] == [256, 244]
