"""Decides what one step runs: who drafts, how many tokens of each draft are verified, which prompts move on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.model.probs import RowLaw
from services.verifier import allocation
from services.verifier.acceptance import Trial
from services.verifier.allocation import Policy
from services.verifier.batch import Work
from services.verifier.draft import NO_DRAFT, Draft
from services.verifier.request import Request
from services.verifier.roster import Roster

_PREFILL_SHARE = 4  # one row in so many is kept from drafts for prompts that wait


@dataclass(frozen=True)
class PrefillBudget:
    """Prompt rows of a step in which somebody decodes: at most `rows`, fewer deep in a long prompt.

    A row costs 1, and 1 more for every `keys_per_row` keys before it, so that chunks take about the same time.
    """

    rows: int
    keys_per_row: float = math.inf

    def afforded(self, start: int, cost: float) -> int:
        """Rows from position `start` on for at most `cost`; one at least, so that every prompt gets on."""
        return max(1, int(cost / self.cost(start, 1)))

    def cost(self, start: int, rows: int) -> float:
        """Of `rows` rows from position `start` on."""
        return rows * (1 + start / self.keys_per_row)


@dataclass(frozen=True)
class Part:
    """One request's share of a step. `draft` is the part of the drafter's `drafted` tokens that is verified."""

    request: Request
    work: Work
    draft: Draft
    drafted: int

    @property
    def prompt_rows(self) -> int:
        """Rows that compute tokens of the prompt."""
        return max(0, min(len(self.work.tokens), self.request.prompt_length - self.work.start))

    @property
    def trial(self) -> Trial:
        """What is judged of it: the draft, and how the token after each sampled row is drawn."""
        laws: list[RowLaw] = []
        if self.work.samples:
            edits = self.request.edits(self.draft.token_ids)
            laws = [self.request.law(position, row) for position, row in enumerate(edits, len(self.request.tokens))]
        return Trial(self.draft, laws, self.request.noise)


def wants(roster: Roster, policy: Policy) -> list[tuple[Request, int]]:
    """Who asks for a draft, and of how many tokens; decided before any draft is seen."""
    asked = []
    for request in roster.running:
        if request.decoding:
            most = allocation.wanted(policy, request.sampling.max_draft_tokens, request.remaining)
            if most:
                asked.append((request, most))
    return asked


def plan_step(roster: Roster, drafts: dict[str, Draft], budget: int, prefill: PrefillBudget) -> list[Part]:
    """What runs within `budget` rows; reserves pages for every row.

    First a row for everybody who decodes, then prompts in order of admission, as `prefill` allows if anybody decodes,
    so that a long prompt does not hold the others up. Drafts get what is left, of the rows and of
    the pages: they are cut to it and take nothing from anybody. Who finds no page for a single row takes those of the
    youngest, which leaves the step and waits.
    """
    decoding = [r for r in roster.running if r.decoding][:budget]
    waiting = sum(r.pending for r in roster.running if not r.decoding)
    prompts = min(budget - len(decoding), prefill.rows if decoding else budget, waiting)
    # Drafts may not starve prompts: a share of the rows is theirs as long as there are any.
    counts = allocation.fit(
        [len(drafts.get(r.request_id, NO_DRAFT)) for r in decoding], budget - min(prompts, budget // _PREFILL_SHARE)
    )
    prompts = min(prompts, budget - len(decoding) - sum(counts))
    for request in decoding:
        if request in roster.running:  # else it gave way to an older one
            roster.reserve(request, 1)
    chunks = _chunks(roster, prompts, prefill if decoding else PrefillBudget(budget))
    parts = []
    for request, count in zip(decoding, counts, strict=True):
        if request in roster.running:
            draft = drafts.get(request.request_id, NO_DRAFT)
            kept = draft.first(roster.reserve(request, 1 + count) - 1)
            parts.append(_part(request, request.tokens[-1:] + kept.token_ids, kept, len(draft)))
    for request, count in chunks:
        if request in roster.running:
            start = request.pages.committed
            parts.append(_part(request, request.tokens[start : start + count], NO_DRAFT, 0))
    return parts


def _chunks(roster: Roster, rows: int, budget: PrefillBudget) -> list[tuple[Request, int]]:
    """Reserves pages for up to `rows` rows of prompts; who got how many."""
    chunks = []
    cost = float(budget.rows)
    for request in [r for r in roster.running if not r.decoding]:
        if min(rows, cost) <= 0 or request not in roster.running:
            continue
        start = request.pages.committed
        count = roster.reserve(request, min(request.pending, rows, budget.afforded(start, cost)))
        chunks.append((request, count))
        rows -= count
        cost -= budget.cost(start, count)
    return chunks


def _part(request: Request, tokens: list[int], draft: Draft, drafted: int) -> Part:
    start = request.pages.committed
    # Only a row whose predecessors all have KV can give a token: the anchor's, and those of its draft.
    samples = 1 + len(draft) if start + len(tokens) >= len(request.tokens) else 0
    return Part(request, Work(tokens, start, samples, request.pages.pages), draft, drafted)
