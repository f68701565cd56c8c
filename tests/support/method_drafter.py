"""A real drafter kind in the engine's own thread: stands in for DrafterLink, without services and network."""

from __future__ import annotations

from dataclasses import replace

from kadence.internal import drafter_pb2 as pb
from services.drafter.messages import from_answer, to_step
from services.drafter.methods import Method
from services.drafter.session import Capacity, Sessions
from services.drafter.step import Answer
from services.model.projection import ProjectionWeights
from tests.support.scripted_drafter import ScriptedDrafter


class MethodDrafter(ScriptedDrafter):
    """Answers every message at once, as services.drafter.engine would; `drafts` keeps what it drafted for whom."""

    def __init__(self, method: Method, weights: ProjectionWeights | None = None) -> None:
        self.drafts: dict[tuple[str, int], list[int]] = {}
        """By request id and length of the text."""
        self.table: Sessions | None = None
        self.use(method, weights)
        super().__init__(lambda *_: [])

    def use(self, method: Method, weights: ProjectionWeights | None) -> None:
        """Another drafter, from the next connection on."""
        self._next = (method, weights)

    def reconnect(self) -> None:
        super().reconnect()
        if self.table is not None:
            for key in self.table.close_all():
                self.method.close(key)
        self.method, weights = self._next
        traits = self.method.traits
        self.table = Sessions(Capacity(64, traits.kv_tokens), traits)
        assert self.connection is not None
        self.connection = replace(
            self.connection,
            max_draft_tokens=traits.max_draft_tokens,
            rows=traits.feature_fingerprint,
            projection=weights,
            window=traits.window,
            kv_tokens=traits.kv_tokens,
            max_rows=traits.max_rows,
            signals=traits.signals,
        )

    def send(self, request: pb.DraftRequest, generation: int) -> None:
        self.requests.append(request)
        assert self.table is not None
        plan = self.table.plan(to_step(request, self.method.traits))
        for key in plan.closes:
            self.method.close(key)
        for key in plan.opens:
            self.method.open(key)
        if plan.news:
            self.method.commit(plan.news)
        if request.proposes:
            items = self.method.propose([item for _, item in plan.proposes])
            drafts = [(stamp, item) for (stamp, _), item in zip(plan.proposes, items, strict=True)]
            for stamp, item in drafts:
                self.drafts[stamp.request_id, stamp.base_length] = item.token_ids
            self.answer(from_answer(Answer(request.step, drafts, list(plan.resyncs.values()), 0.0)))
