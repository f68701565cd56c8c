"""The verifier's own engine without services around it, on the default model; it tells of the steps that count."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from bench.reference import Reference
from deploy.config import DEFAULT_MODEL
from services.model.fetch import resolve
from services.verifier.allocation import Policy
from services.verifier.drafting import Drafting
from services.verifier.engine import Engine, Limits
from services.verifier.outcomes import StepReport
from services.verifier.request import Request, Sampling
from services.verifier.target import Target

_SECONDS = 600


class Stand:
    """To be built in a thread that ends, as services are. `note` is told of each step in which all requests decoded."""

    def __init__(
        self, dtype: str, limits: Limits, drafting: Drafting, k: int, note: Callable[[StepReport], None]
    ) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        target = Target(resolve(DEFAULT_MODEL, allow_fetch=True), dtype)
        target.prepare(limits.max_model_len)
        self._note = note
        self.engine = Engine(target, limits, drafting, self._on_step)
        self.engine.set_policy(Policy("fixed", k, (1, 1)))
        self.engine.start()

    def run(self, prompts: list[list[int]], tokens: int) -> None:
        """Greedy answers of `tokens` tokens to all prompts at once."""
        self._left, self._wanted, self._done = len(prompts), len(prompts), threading.Event()
        sampling = Sampling(0.0, 1.0, 0, 0, tokens, frozenset(), None)
        for number, ids in enumerate(prompts):
            self.engine.submit(Request(str(number), 0, "bars", len(ids), list(ids), sampling))
        assert self._done.wait(_SECONDS), "the engine hangs"

    def _on_step(self, report: StepReport) -> None:
        if sum(update.decode_step for update in report.updates) == self._wanted:
            self._note(report)
        self._left -= sum(update.terminal is not None for update in report.updates)
        if not self._left:
            self._done.set()


def contexts(texts: list[str], shortest: int, step: int) -> list[list[int]]:
    """Each text under the chat template, repeated and cut to `shortest` tokens, the next one `step` more."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    found = []
    for number, text in enumerate(texts):
        ids, wanted = reference.prompt_ids(text), shortest + step * number
        found.append((ids * (wanted // len(ids) + 1))[:wanted])
    return found
