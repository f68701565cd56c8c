"""The engine: one thread that runs steps; each step admits, drafts, verifies, accepts, commits and emits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.model.logprobs import token_logprobs
from services.verifier import batch, planning
from services.verifier.acceptance import judge
from services.verifier.allocation import Policy
from services.verifier.drafting import Drafting
from services.verifier.features import FeatureStore
from services.verifier.inbox import Inbox
from services.verifier.load import load_of
from services.verifier.outcomes import EngineLoad, Pace, StepReport, Totals, Update, update_of
from services.verifier.paged_kv import PagePool, allocate_caches
from services.verifier.planning import Part, PrefillBudget, plan_step
from services.verifier.request import FinishReason, Request, Terminal
from services.verifier.roster import Roster
from services.verifier.target import Target

_log = logging.getLogger(__name__)

_TAKEN = Terminal(FinishReason.FAILED, code="ALREADY_EXISTS", message="this attempt runs for another scheduler")
_CANCELLED = Terminal(FinishReason.CANCELLED)
_FAILED = Terminal(FinishReason.FAILED, code="INTERNAL", message="the engine failed; see the verifier's log")
_PREFILL = PrefillBudget(128)
_FULL = Terminal(FinishReason.FAILED, code="RESOURCE_EXHAUSTED", message="too many requests wait at the verifier")


@dataclass(frozen=True)
class Limits:
    """Bounds of the engine, resolved."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    num_pages: int
    page_size: int
    draft_deadline_seconds: float
    prefill: PrefillBudget = _PREFILL
    prefix_caching: bool = True


class Engine:
    """Owns the target, the KV pages and all request state. `submit`, `stop`, `set_policy` are thread-safe.

    `on_step` is called in the engine's thread after each step that moved a request, or was asked to `report`.
    """

    def __init__(
        self, target: Target, limits: Limits, drafting: Drafting, on_step: Callable[[StepReport], None]
    ) -> None:
        self._target = target
        self._limits = limits
        self._drafting = drafting
        self._on_step = on_step
        self._pool = PagePool(limits.num_pages, limits.page_size)
        self._features = FeatureStore(self._pool, target.dtype)
        self._caches = allocate_caches(target.arch, limits.num_pages, limits.page_size, target.dtype)
        self._kernel, self._layout = batch.attention_for(target, limits.num_pages, limits.page_size)
        self.attention = "native" if self._kernel else "torch"
        self._roster = Roster(self._pool, limits.max_num_seqs, limits.prefix_caching)
        self._totals = Totals()
        self._pace = Pace()
        self._inbox: Inbox[list[Update]] = Inbox()
        self._closing = False
        self._report_due = False
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self.policy = Policy()
        self.broken = False  # whether the thread died of a fault; the replica must then be replaced
        self.beat = time.monotonic()  # when the thread last came round; a busy engine whose beat is old hangs

    # Called from other threads

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after the step in progress; what still runs is dropped."""
        self._inbox.post(lambda _: setattr(self, "_closing", True))
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Queues a request; it gets exactly one terminal update."""
        self._inbox.post(lambda updates: self._enter(request, updates))

    def stop(self, request_id: str, attempt: int) -> None:
        """Ends a request as cancelled before the next step; unknown ones are ignored."""

        def leave(updates: list[Update]) -> None:
            request = self._roster.find(request_id)
            if request is not None and request.attempt == attempt:
                self._end(request, _CANCELLED, updates)

        self._inbox.post(leave)

    def report(self) -> None:
        """Makes the next step tell the load, whether or not it moves a request."""
        self._inbox.post(lambda _: setattr(self, "_report_due", True))

    def set_policy(self, policy: Policy) -> None:
        """Takes the policy if its epoch is newer than the one in force."""
        if policy.epoch > self.policy.epoch:
            self.policy = policy

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._roster)

    def load(self) -> EngineLoad:
        """A snapshot, for the engine's thread: it walks the requests."""
        return load_of(self._roster, self._totals, self._pace, self.policy)

    # The engine's thread

    def _live(self) -> None:
        try:
            self._run()
        except BaseException:
            self.broken = True
            _log.critical("the engine is broken; this replica serves no more", exc_info=True)
        while self.broken and not self._closing:  # whoever still comes is told, not left waiting
            updates: list[Update] = []
            self._fail_all(updates)
            for apply in self._inbox.take(wait=True):
                apply(updates)

    def _run(self) -> None:
        while True:
            if self._inbox.empty() and not self.busy:
                self._idle()
            updates: list[Update] = []
            for apply in self._inbox.take(wait=not self.busy):
                apply(updates)
            self.beat = time.monotonic()
            if self._closing:
                return
            try:
                self.step(updates)
            except Exception:
                _log.exception("step failed; its requests fail")
                self._fail_all(updates)

    def step(self, updates: list[Update]) -> None:
        """One step; `updates` already holds the ends that came with the inbox."""
        start = time.perf_counter()
        self._totals.steps += 1
        self._features.use(self._drafting.projection)
        self._roster.admit(self._features.fingerprint)
        self._drafting.ask(self._totals.steps, planning.wants(self._roster, self.policy), self._features)
        drafts = self._drafting.collect(self._pace.patience(self._limits.draft_deadline_seconds))
        parts = plan_step(self._roster, drafts, self._limits.max_num_batched_tokens, self._limits.prefill)
        if parts:
            self._verify(parts, updates)
        self._report(updates, time.perf_counter() - start, sum(len(part.work.tokens) for part in parts))

    def _verify(self, parts: list[Part], updates: list[Update]) -> None:
        """One ragged target pass over all parts; accepts, commits, and rolls back what was not accepted."""
        forward, order = batch.plan([part.work for part in parts], self._layout)
        parts = [parts[i] for i in order]
        with torch.inference_mode():
            logits, tapped = self._target.forward_tapped(forward, self._caches, self._kernel, self._features.taps)
            self._features.store(forward.cells, tapped)
            verdicts = judge(logits, [part.trial for part in parts])
        self._totals.prompt_tokens += sum(part.prompt_rows for part in parts)
        row = 0
        for part, verdict in zip(parts, verdicts, strict=True):
            rows = slice(row, row + part.work.samples)
            self._commit(part, verdict, logits[rows], updates)
            row += part.work.samples
        if drafting := sum(1 for part in parts if part.drafted):
            self._pace.add_gain(sum(update.accepted for update in updates) / drafting)

    def _commit(self, part: Part, verdict: list[int], logits: Tensor, updates: list[Update]) -> None:
        request, decode_step = part.request, part.request.decoding
        if not verdict:  # a prefill chunk that does not reach the end
            self._roster.commit(request, len(part.work.tokens), self._features.fingerprint)
            return
        before = update_of(request)
        tokens, terminal = request.append(verdict)
        # The newest token stays without KV; rejected rows, and rows past the end, are rolled back.
        self._roster.commit(request, request.pending - 1, self._features.fingerprint)
        wanted = request.sampling.logprobs
        update = replace(
            before,
            tokens=tokens,
            drafted=part.drafted,
            verified=len(part.draft),
            accepted=min(len(verdict) - 1, len(tokens)),
            decode_step=decode_step,
            terminal=terminal,
            cached_tokens=(request.cached_tokens or 0) if request.round == 0 else 0,
            logprobs=[] if wanted is None else token_logprobs(logits[: len(tokens)], tokens, wanted),
        )
        request.round += 1
        updates.append(update)
        self._totals.add(update)
        if terminal is not None:
            self._leave(request)

    def _report(self, updates: list[Update], seconds: float, rows: int) -> None:
        if rows:
            self._pace.add_step(seconds)
        if updates or rows or self._report_due:
            self._report_due = False
            self._on_step(StepReport(self._totals.steps, updates, seconds if rows else 0.0, rows, self.load()))

    def _idle(self) -> None:
        """Nothing to do: nobody may hold a page, and the drafter learns who left."""
        self._pool.check()
        assert self._pool.used == 0, "idle, yet pages are in use"
        self._drafting.flush()

    def _enter(self, request: Request, updates: list[Update]) -> None:
        if held := self._roster.find(request.request_id):
            if held.attempt >= request.attempt:  # a duplicate; the one held goes on
                if held.owner != request.owner:
                    updates.append(update_of(request, _TAKEN))
                return
            self._leave(held)  # a newer attempt replaces it, also in a full queue; nobody waits for the old one's end
        elif len(self._roster.waiting) >= self._limits.max_waiting:
            updates.append(update_of(request, _FULL))
            return
        self._roster.add(request)

    def _end(self, request: Request, terminal: Terminal, updates: list[Update]) -> None:
        updates.append(update_of(request, terminal))
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self._roster.remove(request)
        self._drafting.forget(request)

    def _fail_all(self, updates: list[Update]) -> None:
        for request in [*self._roster.running, *self._roster.waiting]:
            self._end(request, _FAILED, updates)
        self._report(updates, 0.0, 0)
