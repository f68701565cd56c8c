"""Runs requests through a real engine in this process, without services around it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from services.verifier.allocation import Policy
from services.verifier.drafting import Drafting
from services.verifier.engine import Engine, Limits
from services.verifier.outcomes import StepReport, Update
from services.verifier.request import Request, Sampling, Terminal
from services.verifier.target import Target
from tests.support.scripted_drafter import ScriptedDrafter

_SECONDS = 60.0
# Options that change nothing where they are left out.
_NEUTRAL = {f.name for f in fields(Sampling) if f.default is not MISSING or f.default_factory is not MISSING}


def limits(**changes: Any) -> Limits:
    """Room for anything a tiny model does."""
    values = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "max_waiting": 100_000,
        "max_model_len": 256,
        "num_pages": 1024,
        "page_size": 8,
        "draft_deadline_seconds": 5.0,
        **changes,
    }
    return Limits(**values)


def request(name: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> Request:
    """A request as the edge makes it; greedy unless told otherwise. `committed`: tokens of an earlier attempt."""
    sampling = Sampling(
        temperature=options.pop("temperature", 0.0),
        top_p=options.pop("top_p", 1.0),
        top_k=options.pop("top_k", 0),
        seed=options.pop("seed", 0),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(options.pop("stop", ())),
        max_draft_tokens=options.pop("max_draft_tokens", None),
        **{name: options.pop(name) for name in _NEUTRAL & options.keys()},
    )
    tokens = [*prompt, *options.pop("committed", ())]
    attempt, owner = options.pop("attempt", 0), options.pop("owner", "owner")
    assert not options, options
    return Request(name, attempt, owner, len(prompt), tokens, sampling)


@dataclass
class Answer:
    """What became of one request."""

    updates: list[Update] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def terminal(self) -> Terminal | None:
        return self.updates[-1].terminal if self.updates else None

    def check(self, length: int) -> None:
        """One terminal, at the end; base lengths and rounds count on from `length` committed tokens without a gap."""
        assert [update.terminal is not None for update in self.updates] == [False] * (len(self.updates) - 1) + [True]
        moves = [update for update in self.updates if update.tokens]
        assert [update.round for update in moves] == list(range(len(moves)))
        lengths = itertools.accumulate((len(update.tokens) for update in moves), initial=length)
        assert [update.base_length for update in moves] == list(lengths)[:-1]
        for u in moves:
            assert 0 <= u.accepted <= u.verified <= u.drafted and u.accepted <= len(u.tokens) <= u.accepted + 1


class Harness:
    """An engine with its thread. `on_step` is told after each step, in the engine's thread."""

    def __init__(
        self,
        target: Target,
        *,
        k: int = 0,
        drafter: ScriptedDrafter | None = None,
        on_step: Callable[[StepReport], None] = lambda report: None,
        **changes: Any,
    ) -> None:
        self.limits = limits(**changes)
        target.prepare(self.limits.max_model_len)
        link = drafter or ScriptedDrafter(lambda *_: [])
        if drafter is None:
            link.connection = None
        self.drafting = Drafting(link, target.arch.vocab_size)  # type: ignore[arg-type]
        self.engine = Engine(target, self.limits, self.drafting, self._step)
        self.engine.set_policy(Policy(f"fixed:{k}", k, (1, 1)))
        self.answers: dict[str, Answer] = {}
        self.reports: list[StepReport] = []
        self._on_step = on_step
        self._left: set[str] = set()
        self._done = threading.Event()

    def run(self, requests: Sequence[Request]) -> dict[str, Answer]:
        """All requests at once, to their ends. Checks updates, and that every page is free afterwards."""
        starts = {r.request_id: len(r.tokens) for r in requests}
        self._left = set(starts)
        for r in requests:
            self.engine.submit(r)
        self.engine.start()
        finished = self._done.wait(_SECONDS)
        self.engine.close()
        assert finished, f"unfinished after {_SECONDS:.0f} s: {sorted(self._left)}"
        for name, length in starts.items():
            self.answers[name].check(length)
        load = self.engine.load()
        assert (load.pages_used, load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0, 0)
        self.engine._pool.check()
        return self.answers

    def _step(self, report: StepReport) -> None:
        self.reports.append(report)
        for update in report.updates:
            self.answers.setdefault(update.request_id, Answer()).updates.append(update)
            if update.terminal is not None:
                self._left.discard(update.request_id)
        self._on_step(report)
        if not self._left:
            self._done.set()
