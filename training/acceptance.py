"""Acceptance length of a served drafter: how it is measured everywhere.

Answers have at most TOKENS tokens and end where the model ends them. What follows the first 16-gram that comes a
second time is left out, because a small model loops, and loops flatter any drafter. Counted are the tokens of decode
steps, the target's own in each step included; the first token of an answer is the prompt's, and no step's. A step that
goes on beyond the answer's end, or beyond the loop's beginning, counts with the tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kadence.cluster import LLM
from kadence.errors import InternalError
from training.conversations import before_loop

TOKENS = 160
"""Longest answer."""
_TRIES = 8  # of an answer whose steps came together, as they may where the machine is busy
_RESAMPLES = 1000


@dataclass(frozen=True)
class Counted:
    """One answer: its ids, of which the first `kept` count, and the steps that made those but the first."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    kept: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of the steps."""
        return self.kept - 1


@dataclass(frozen=True)
class Acceptance:
    """What was counted, request by request; one that ended with its first token has no step and no length."""

    answers: tuple[Counted, ...]

    @property
    def lengths(self) -> list[float]:
        """Tokens per step of each request."""
        return [answer.tokens / answer.steps for answer in self.answers if answer.steps]

    @property
    def tokens(self) -> int:
        """Of all steps."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def steps(self) -> int:
        """Of all requests."""
        return sum(answer.steps for answer in self.answers)

    @property
    def pooled(self) -> float:
        """Tokens per step of all requests together; 0 if there was no step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def excluded(self) -> float:
        """Share of all tokens that were left out because answers looped."""
        total = sum(len(answer.token_ids) for answer in self.answers)
        return sum(len(answer.token_ids) - answer.kept for answer in self.answers) / total if total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Where the pooled length lies with 90 % confidence, requests being a sample."""
        return interval([(answer.tokens, answer.steps) for answer in self.answers if answer.steps])


def measure(
    llm: LLM,
    prompts: Sequence[str],
    *,
    temperature: float,
    max_draft_tokens: int,
    rule: Literal["match", "ratio"] = "match",
    seed: int = 0,
) -> Acceptance:
    """Asks each prompt as a chat, one request at a time, the i-th with seed + i; 0 drafts is plain decoding.

    The cluster should wait for drafts however late (verifier.draft_deadline_seconds), or the machine's load counts,
    too. Raises APIError.
    """
    return Acceptance(
        tuple(
            _ask(llm, prompt, temperature=temperature, max_draft_tokens=max_draft_tokens, rule=rule, seed=seed + number)
            for number, prompt in enumerate(prompts)
        )
    )


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The 90 % interval of sum(above) / sum(below) over pairs (above, below), bootstrapped; the same every time."""
    if not pairs:
        return 0.0, 0.0
    draw, found = random.Random(0), []
    for _ in range(_RESAMPLES):
        sample = draw.choices(pairs, k=len(pairs))
        found.append(sum(above for above, _ in sample) / sum(below for _, below in sample))
    found.sort()
    return found[_RESAMPLES // 20], found[-1 - _RESAMPLES // 20]


def steps_within(lengths: Sequence[int], kept: int) -> int:
    """How many steps begin before `kept` tokens are there. lengths: tokens of each step, behind the first token."""
    end, count = 1, 0
    for length in lengths:
        if end >= kept:
            break
        end += length
        count += 1
    return count


def _ask(
    llm: LLM,
    prompt: str,
    *,
    temperature: float,
    max_draft_tokens: int,
    rule: Literal["match", "ratio"],
    seed: int,
) -> Counted:
    for _ in range(_TRIES):
        with llm.stream(
            messages=[{"role": "user", "content": prompt}],
            max_tokens=TOKENS,
            temperature=temperature,
            max_draft_tokens=max_draft_tokens,
            rule=rule,
            seed=seed,
        ) as stream:
            chunks = [len(chunk.token_ids) for chunk in stream if chunk.token_ids]
        result = stream.result
        kept, told = before_loop(result.token_ids), result.stats
        if kept == len(result.token_ids):
            steps = told.steps
        elif len(chunks) == told.steps + 1:  # of a stream alone a chunk is a step, if none came together with another
            steps = steps_within(chunks[1:], kept)
        else:
            continue
        return Counted(result.prompt_token_ids, result.token_ids, kept, steps)
    raise InternalError(f"steps of an answer came together {_TRIES} times; the machine is too busy to count them")
