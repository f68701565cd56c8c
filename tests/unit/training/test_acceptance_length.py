"""How acceptance is measured: steps of a served answer against a count by hand, loops left out, and the interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from kadence.cluster import LLM
from kadence.errors import InternalError
from tests.support.tiny_llama import TinyLlama
from training.acceptance import Acceptance, Counted, interval, measure, steps_within

PROMPTS = ["hello there", "x"]
K = 7


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that soon repeats itself, with n-grams, which draft little else than repetitions."""
    folder = TinyLlama(tmp_path_factory.mktemp("models") / "tiny", seed=1).folder
    verifier = {"draft_deadline_seconds": 30, "threads": 1}
    with LLM(str(folder), drafter="ngram", policy=f"fixed:{K}", dtype="float32", verifier=verifier) as llm:
        yield llm


def look_up(text: Sequence[int], most: int) -> list[int]:
    """Prompt look-up of 5 to 2 tokens by search: what followed the last time; past the text it goes on in itself."""
    for n in (5, 4, 3, 2):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                longer = list(text)
                for i in range(most):
                    longer.append(longer[end + i])
                return longer[len(text) :]
    return []


def by_hand(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Steps until `answer` is there, drafted by look-up and checked against it."""
    have, steps = 1, 0
    while have < len(answer):
        draft = look_up([*prompt, *answer[:have]], K)
        right = [a == b for a, b in zip(draft, answer[have:], strict=False)]
        have += (right.index(False) if False in right else len(right)) + 1
        steps += 1
    return steps


def repeats(ids: Sequence[int]) -> int | None:
    """Where the first 16-gram ends that was there before."""
    for end in range(17, len(ids) + 1):
        if any(ids[at : at + 16] == ids[end - 16 : end] for at in range(end - 16)):
            return end
    return None


def test_steps_are_those_of_a_count_by_hand(llm: LLM) -> None:
    found = measure(llm, PROMPTS, temperature=0.0, max_draft_tokens=K)
    assert any(answer.kept < len(answer.token_ids) for answer in found.answers), "no answer loops: nothing is tested"
    for answer in found.answers:
        assert answer.kept == (repeats(answer.token_ids) or len(answer.token_ids))
        assert answer.steps == by_hand(answer.prompt_ids, answer.token_ids[: answer.kept])
    whole = sum(len(answer.token_ids) for answer in found.answers)
    kept = sum(answer.kept for answer in found.answers)
    assert found.excluded == pytest.approx(1 - kept / whole)
    assert found.tokens == kept - len(PROMPTS) and found.pooled == found.tokens / found.steps > 1.2


def test_plain_decoding_is_one_and_seeds_differ(llm: LLM) -> None:
    found = measure(llm, ["x"] * 2, temperature=1.0, max_draft_tokens=0, seed=5)
    assert found.lengths == [1.0, 1.0]
    assert found.answers[0].token_ids != found.answers[1].token_ids


@pytest.mark.parametrize(
    ("lengths", "kept", "steps"),
    [([3, 1, 4], 9, 3), ([3, 1, 4], 8, 3), ([3, 1, 4], 6, 3), ([3, 1, 4], 5, 2), ([3, 1, 4], 2, 1), ([3], 1, 0)],
)
def test_a_step_counts_if_it_begins_before_the_end(lengths: list[int], kept: int, steps: int) -> None:
    assert steps_within(lengths, kept) == steps


def test_requests_and_pool() -> None:
    found = Acceptance((counted(9, 4), counted(5, 1), counted(1, 0)))
    assert found.lengths == [2.0, 4.0]
    assert found.pooled == 12 / 5
    assert Acceptance(()).pooled == Acceptance(()).excluded == 0.0


def test_interval_is_that_of_requests() -> None:
    """Of 25 requests with mean 2 and deviation 1 a fifth of 1.64 to either side, about."""
    low, high = interval([(tokens, 10) for tokens in (10, 20, 30) * 8 + (20,)])
    assert low == pytest.approx(2 - 1.64 * 0.8 / 5, abs=0.06) and high == pytest.approx(2 + 1.64 * 0.8 / 5, abs=0.06)
    assert interval([(30, 15)] * 4) == (2.0, 2.0)


def counted(kept: int, steps: int) -> Counted:
    return Counted((1,), tuple(range(kept)), kept, steps)


def test_steps_that_come_together_are_not_guessed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.acceptance._TRIES", 0)
    with pytest.raises(InternalError, match="came together"):
        measure(llm, PROMPTS[:1], temperature=0.0, max_draft_tokens=K)
