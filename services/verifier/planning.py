"""Decides what one step runs: who drafts, how many tokens of each draft are verified, which prompts move on."""

from __future__ import annotations

from dataclasses import dataclass

from services.model.probs import RowLaw
from services.verifier import allocation
from services.verifier.allocation import Policy
from services.verifier.batch import Work
from services.verifier.request import Request
from services.verifier.roster import Roster

_PREFILL_SHARE = 4  # one row in so many is kept from drafts for prompts that wait


@dataclass(frozen=True)
class Part:
    """One request's share of a step. `draft` is the part of the drafter's `drafted` tokens that is verified."""

    request: Request
    work: Work
    draft: list[int]
    drafted: int

    @property
    def laws(self) -> list[RowLaw]:
        """How the token after each sampled row is drawn."""
        first = len(self.request.tokens)
        return [self.request.law(first + j) for j in range(self.work.samples)]


def wants(roster: Roster, policy: Policy) -> list[tuple[Request, int]]:
    """Who asks for a draft, and of how many tokens; decided before any draft is seen."""
    asked = []
    for request in roster.running:
        if request.decoding:
            most = allocation.wanted(policy, request.sampling.max_draft_tokens, request.remaining)
            if most:
                asked.append((request, most))
    return asked


def plan_step(roster: Roster, drafts: dict[str, list[int]], budget: int) -> list[Part]:
    """Decode rows first, then prefill chunks, within `budget` rows; reserves pages for every row.

    A request that does not fit with its draft goes without; one that does not fit at all takes the pages of younger
    ones, which leave the step and wait.
    """
    parts: dict[Request, Part] = {}
    decoding = [r for r in roster.running if r.decoding][:budget]
    drafted = [drafts.get(r.request_id, []) for r in decoding]
    waiting = sum(r.pending for r in roster.running if not r.decoding)
    # Drafts may not starve prompts: a share of the rows is theirs as long as there are any.
    counts = allocation.fit([len(draft) for draft in drafted], budget - min(waiting, budget // _PREFILL_SHARE))
    for request, draft, count in zip(decoding, drafted, counts, strict=True):
        if request not in roster.running:
            continue  # gave way to an older one
        kept = draft[:count] if roster.pool.reserve(request.pages, 1 + count) else []
        if roster.reserve(request, 1 + len(kept)):
            parts[request] = _part(request, request.tokens[-1:] + kept, kept, len(draft))
    budget -= sum(len(part.work.tokens) for part in parts.values())
    for request in [r for r in roster.running if not r.decoding]:
        chunk = min(request.pending, budget)
        if chunk > 0 and request in roster.running and roster.reserve(request, chunk):
            committed = request.pages.committed
            parts[request] = _part(request, request.tokens[committed : committed + chunk], [], 0)
            budget -= chunk
    return [part for request, part in parts.items() if request in roster.running]


def _part(request: Request, tokens: list[int], draft: list[int], drafted: int) -> Part:
    start = request.pages.committed
    # Only a row whose predecessors all have KV can give a token: the anchor's, and those of its draft.
    samples = 1 + len(draft) if start + len(tokens) >= len(request.tokens) else 0
    return Part(request, Work(tokens, start, samples, request.pages.pages), draft, drafted)
