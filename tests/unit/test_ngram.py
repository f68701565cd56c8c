"""The n-gram drafter against a plain search, and its promise of constant work per token."""

from __future__ import annotations

import random
import time

import pytest

from kadence.errors import ConfigError
from services.drafter.methods import NewTokens, ProposeItem, Setting, create
from services.drafter.methods.ngram import Method, NgramIndex, NgramOptions

SETTING = Setting(max_draft_tokens=5, max_sessions=8, kv_tokens=1024)


def search(tokens: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    """What NgramIndex promises, by scanning the text."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(30))
def test_equals_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    min_n = rng.randint(1, 3)
    max_n = rng.randint(min_n, 5)
    vocabulary = rng.choice([[0, 1], [0, 1, 2, 3], [0, 7, 2**31 - 1, 49151], list(range(30))])
    index, tokens = NgramIndex(min_n, max_n), []
    for _ in range(60):
        new = [rng.choice(vocabulary) for _ in range(rng.randint(0, 5))]
        index.append(new)
        tokens += new
        count = rng.randint(1, 9)
        assert index.draft(count) == search(tokens, min_n, max_n, count), (tokens, min_n, max_n, count)


def test_prefers_the_longest_suffix_then_the_latest() -> None:
    index = NgramIndex(1, 3)
    index.append([1, 2, 3, 10, 9, 3, 20, 1, 2, 3])
    assert index.draft(1) == [10]  # after 1 2 3, although 3 alone was last followed by 20
    index = NgramIndex(2, 3)
    index.append([1, 2, 10, 1, 2, 20, 5, 1, 2])
    assert index.draft(2) == [20, 5]


def test_runs_on_in_loops() -> None:
    index = NgramIndex(2, 5)
    index.append([5, 6, 7, 5, 6, 7, 5])
    assert index.draft(7) == [6, 7, 5, 6, 7, 5, 6]


@pytest.mark.parametrize("tokens", [[], [4], [4, 4], [1, 2, 3, 4, 5, 6]])
def test_nothing_to_propose(tokens: list[int]) -> None:
    index = NgramIndex(2, 5)
    index.append(tokens)
    assert index.draft(4) == []


def test_sessions_do_not_mix() -> None:
    method = Method(NgramOptions(), SETTING)
    for key in (1, 2):
        method.open(key)
    method.commit([NewTokens(1, [1, 2, 3, 1, 2]), NewTokens(2, [1, 2, 9, 1, 2])])
    items = [ProposeItem(2, 1), ProposeItem(1, 1)]
    assert [draft.token_ids for draft in method.propose(items)] == [[9], [3]]
    method.close(1)
    assert method.propose([ProposeItem(2, 1)])[0].token_ids == [9]


def test_work_per_token_does_not_grow() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(50) for _ in range(40_000)]

    def seconds(size: int) -> float:
        index = NgramIndex(2, 5)
        index.append(tokens[:size])
        best = 1.0
        for _ in range(5):
            began = time.perf_counter()
            for token in tokens[:200]:
                index.append([token])
                index.draft(8)
            best = min(best, time.perf_counter() - began)
        return best

    assert seconds(39_000) < 6 * seconds(500)  # a scan would take eighty times as long


def test_registry() -> None:
    assert create("ngram", {"min_n": 3}, SETTING).traits.max_draft_tokens == SETTING.max_draft_tokens
    assert create("none", {}, SETTING).traits.max_draft_tokens == 0
    with pytest.raises(ConfigError, match="must be one of none, ngram, dflash, dflash2"):
        create("eagle", {}, SETTING)
    for several in ("ngram,none", "ngram+none", ["ngram", "none"]):
        with pytest.raises(ConfigError, match="one request runs one drafter"):
            create(several, {}, SETTING)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"\[drafter.options\] min_n = 7 must not exceed max_n = 5"):
        create("ngram", {"min_n": 7}, SETTING)
    with pytest.raises(ConfigError, match='unknown key min; did you mean "min_n"'):
        create("ngram", {"min": 7}, SETTING)
