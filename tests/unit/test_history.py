"""The edits of every row of a block: against transformers' processors, OpenAI's formulas of penalties, and counts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from services.model.edits import apply
from services.verifier.history import BadWords, History, Tally
from services.verifier.sampling import Sampling
from tests.support.engine_harness import request

VOCAB, PROMPT, ANSWER, DRAFT = 30, [3, 4, 3, 9, 20], [7, 3, 7, 7, 25], [7, 8, 8, 3, 4]
BAD = [[12], [3, 4], [8, 8], [7, 7, 7], [20, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
STOPS, ALLOWED = [2, 25, 8], [0, 3, 8, 11, 25]


def sampling(**options: Any) -> Sampling:
    return request("", [1], 50, **options).sampling


def rows(answer: list[int], draft: list[int], **options: Any) -> list[torch.Tensor]:
    """Logits of each row of the block, edited; the raw ones are `raw(0)`, `raw(1)`, ..."""
    history = History(sampling(**options), PROMPT)
    found = []
    for j, edits in enumerate(history.edits(PROMPT + answer, draft)):
        row = raw(j)
        if edits is not None:
            apply(row, edits)
        found.append(row)
    return found


def raw(j: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(j)) * 3


PROCESSORS: dict[str, tuple[dict[str, Any], LogitsProcessor]] = {
    "repetition": ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
    "reward": ({"repetition_penalty": 0.6}, RepetitionPenaltyLogitsProcessor(0.6)),
    "bad words": ({"bad_words": tuple(map(tuple, BAD))}, NoBadWordsLogitsProcessor(BAD)),
    "min tokens": (
        {"min_tokens": 8, "stop": STOPS},
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, STOPS),
    ),
    "allowed": (
        {"allowed_token_ids": tuple(ALLOWED)},
        PrefixConstrainedLogitsProcessor(lambda batch, text: ALLOWED, num_beams=1),
    ),
    "bad tokens": ({"bad_words": ((4,), (5,), (4,))}, SuppressTokensLogitsProcessor([4, 5])),
    "bias": ({"logit_bias": {3: 2.5, 8: -100.0}}, SequenceBiasLogitsProcessor([[[3], 2.5], [[8], -100.0]])),
}


@pytest.mark.parametrize("draft", [[], DRAFT[:1], DRAFT])
@pytest.mark.parametrize("answer", [[], ANSWER])
@pytest.mark.parametrize("name", PROCESSORS)
def test_each_row_is_what_transformers_makes_of_it(name: str, answer: list[int], draft: list[int]) -> None:
    options, processor = PROCESSORS[name]
    for j, row in enumerate(rows(answer, draft, **options)):
        text = torch.tensor([PROMPT + answer + draft[:j]])
        assert torch.equal(row, processor(text, raw(j)[None].clone())[0]), (j, name)


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (-0.5, 2.0), (1.2, -0.3)])
def test_frequency_and_presence(frequency: float, presence: float) -> None:
    """mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, as OpenAI's API reference says; not the prompt."""
    options = {"frequency_penalty": frequency, "presence_penalty": presence}
    for answer in ([], ANSWER):
        for j, row in enumerate(rows(answer, DRAFT, **options)):
            count = torch.tensor([float((answer + DRAFT[:j]).count(token)) for token in range(VOCAB)])
            torch.testing.assert_close(row, raw(j) - count * frequency - (count > 0) * presence)


def test_in_company_bias_comes_before_penalties() -> None:
    """A bias lifts 3 above 0, where the repetition penalty divides; then what it produced is taken off."""
    options = {"logit_bias": {3: 10.0}, "repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 1.0}
    for j, row in enumerate(rows(ANSWER, DRAFT, **options)):
        assert raw(j)[3] > -10
        count = (ANSWER + DRAFT[:j]).count(3)
        assert float(row[3]) == pytest.approx((float(raw(j)[3]) + 10) / 2 - 0.5 * count - 1, abs=1e-5)


def test_masks_hold_against_any_bias() -> None:
    options = {"logit_bias": {2: 100.0, 5: 100.0}, "repetition_penalty": 0.1, "allowed_token_ids": (2, 9)}
    (row,) = rows([], [], stop=[2], min_tokens=1, **options)
    assert row.isfinite().nonzero().flatten().tolist() == [9]


def test_bad_words_give_way_where_nothing_else_is_left() -> None:
    """Allowed ids and min_tokens stand; so does a bad word wherever there is a choice."""
    options: dict[str, Any] = {
        "allowed_token_ids": (2, 5, 6),
        "stop": [2],
        "min_tokens": 1,
        "bad_words": ((5,), (9, 6)),
    }
    found = [row.isfinite().nonzero().flatten().tolist() for row in rows([], [9, 2], **options)]
    assert found == [[6], [2], [2, 6]]
    options["bad_words"] = ((5,), (20, 6))  # after the prompt nothing is left
    found = [row.isfinite().nonzero().flatten().tolist() for row in rows([], [9], **options)]
    assert found == [[5, 6], [2, 6]]


def test_rows_without_a_change_have_no_edits() -> None:
    none = [None] * 3
    assert request("r", PROMPT, 9).edits([1, 2]) == none
    assert request("r", PROMPT, 9, stop=[5], logprobs=3, min_p=0.2).edits([1, 2]) == none
    assert request("r", PROMPT, 9, bad_words=((11, 12), (1, 2, 3))).edits([1, 5]) == none
    assert request("r", PROMPT, 9, stop=[5], min_tokens=2, committed=[4, 4]).edits([1, 2]) == none
    assert request("r", PROMPT, 9, min_tokens=2).edits([1, 2]) == none
    counted = request("r", PROMPT, 9, presence_penalty=1.0).edits([1, 2])
    assert [None if e is None or e.produced is None else e.produced[0].tolist() for e in counted] == [None, [1], [1, 2]]
    held = request("r", PROMPT, 9, stop=[5], min_tokens=2).edits([1, 2])
    assert [e is not None for e in held] == [True, True, False]


@pytest.mark.parametrize("seed", range(5))
def test_a_history_does_not_depend_on_how_it_came_about(seed: int) -> None:
    """Drafts accepted, rejected or none, a fresh history over all tokens: the same edits, those of the counts."""
    rng = random.Random(seed)
    options = sampling(repetition_penalty=1.3, frequency_penalty=1.0, presence_penalty=1.0)
    prompt = [rng.randrange(300) for _ in range(rng.choice([1, 200]))]
    history, tokens = History(options, prompt), list(prompt)
    for _ in range(60):
        draft = [rng.randrange(300) for _ in range(rng.randint(0, 7))]
        fresh = History(options, prompt)
        for j, (one, other) in enumerate(zip(history.edits(tokens, draft), fresh.edits(tokens, draft), strict=True)):
            assert one is not None and one.seen is not None and other is not None and other.seen is not None
            text = tokens + draft[:j]
            assert sorted(one.seen.tolist()) == sorted(other.seen.tolist()) == sorted(set(text))
            counts = Counter(text[len(prompt) :])
            for edits in (one, other):
                assert (edits.produced is not None) == bool(counts)
                ids, times = edits.produced or (torch.empty(0), torch.empty(0))
                assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == counts
        tokens += [*draft[: rng.randint(0, len(draft))], rng.randrange(300)]


def test_a_tally_takes_back_what_came_last() -> None:
    tally = Tally([5, 6, 5])
    tally.add(7)
    tally.add(6)
    view = tally.ids
    tally.take_back([7, 6])
    assert (len(tally), tally.ids.tolist(), tally.counts.tolist()) == (2, [5, 6], [2, 1])
    assert view.tolist() == [5, 6, 7]
    for token in range(100, 300):
        tally.add(token)
    assert tally.ids.tolist() == [5, 6, *range(100, 300)] and tally.counts.tolist() == [2.0] + [1.0] * 201


def test_bad_words_look_no_further_back_than_they_reach() -> None:
    words = BadWords([(1,), (2, 3), (4, 2, 6), (4, 2, 7)])
    assert words.reach == 2 and BadWords([(1,)]).reach == 1

    def after(*text: int) -> list[int]:
        found = words.after(list(text))
        return sorted(found.tolist()) if found is not None else []

    assert (after(9), after(2), after(4, 2), after(2, 4)) == ([1], [1, 3], [1, 3, 6, 7], [1])
    assert BadWords([(2, 3)]).after([3]) is None
