"""The inner loop on one device, without services around it: draft, verify, accept, for many texts in lock step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.random_models import RandomWeights, Shape
from services.drafter.backbone import Backbone
from services.drafter.draft_kv import DraftKV
from services.drafter.draft_weights import build_draft
from services.drafter.path_selector import DraftLaw, PathSelector
from services.kernels.attention_plan import Layout
from services.kernels.device import moved
from services.model.linear import Linear
from services.model.probs import RowLaw
from services.model.projection import Projection
from services.verifier import batch
from services.verifier.acceptance import Trial, judge
from services.verifier.batch import Work
from services.verifier.draft import NO_DRAFT, Draft
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import ForwardBatch, Target

PAGE = 16


class Models:
    """Target and drafter of one shape with random weights, and room for `sequences` texts, full of random K/V."""

    def __init__(self, shape: Shape, sequences: int, steps: int, device: torch.device) -> None:
        """steps: how many a text can take."""
        self.shape = shape
        self.device = device
        source = RandomWeights(device)
        self.target = Target.built(shape.target, source, shape.dtype)
        self.target_bytes = source.bytes
        arch, table = shape.drafter, (shape.target.vocab_size, shape.target.hidden_size)
        weights = build_draft(source, arch, shape.dtype)
        self.drafter_bytes = source.bytes - self.target_bytes
        self.projection = Projection(weights.projection, shape.dtype)
        embedding = source.take("model.embed_tokens.weight", table, shape.dtype)
        head = source.take("lm_head.weight", table, shape.dtype)
        self.table_bytes = embedding.numel() * embedding.element_size()

        reach = shape.context + (steps + 1) * arch.block_size
        self.target.prepare(reach)
        self.pages_each = -(-reach // PAGE)
        self.layout = Layout(self.pages_each * sequences, PAGE, shape.target.num_kv_heads, shape.dtype)
        self.caches = allocate_caches(shape.target, self.layout.num_pages, PAGE, shape.dtype, device)
        self.draft_kv = DraftKV(arch, reach * sequences, sequences, arch.block_size, shape.dtype, device)
        self.backbone = Backbone(weights, embedding, self.draft_kv)
        self.selector = PathSelector(weights.selector, Linear(head), arch)
        for cache in (*self.caches, *self.draft_kv.caches):
            cache.normal_()
        # As a pool gives them out after a while: in no order.
        self.pages = torch.randperm(self.layout.num_pages).tolist()


@dataclass
class Text:
    """One sequence: random K/V, then `tokens`, of which the newest, the anchor, has neither K/V nor row.

    context: where the first of `tokens` stands. rows [n, h]: those that the drafter lacks, up to the anchor's.
    """

    key: int
    pages: list[int]
    context: int
    tokens: list[int]
    rows: Tensor | None = None

    @property
    def anchor(self) -> int:
        """The newest token."""
        return self.tokens[-1]

    @property
    def position(self) -> int:
        """Where the anchor stands: how many tokens have K/V."""
        return self.context + len(self.tokens) - 1


class Cycle:
    """Runs steps of `sequences` texts that draft whole blocks and verify the first `k` tokens (0: nobody drafts)."""

    def __init__(self, models: Models, sequences: int, k: int) -> None:
        self._models, self._k = models, k
        size, context = models.pages_each, models.shape.context
        self.texts = []
        for key in range(sequences):
            models.draft_kv.open(key)
            models.draft_kv.append(key, 0, context)
            self.texts.append(Text(key, models.pages[key * size : (key + 1) * size], context, [7 + key]))
        self._order: list[int] = []
        self._logits = self._rows = torch.empty(0)

    def close(self) -> None:
        """Makes room for another."""
        for text in self.texts:
            self._models.draft_kv.close(text.key)

    def step(self) -> int:
        """Drafts, verifies, accepts; returns how many tokens were committed."""
        drafts = self.draft()
        self.verify(drafts)
        return self.accept(drafts)

    @torch.inference_mode()
    def draft(self) -> list[Draft]:
        """Sends the rows that the drafter lacks, runs one block for everybody, and walks the selector."""
        if not self._k:
            return [NO_DRAFT] * len(self.texts)
        models, arch = self._models, self._models.shape.drafter
        sent = [(t.key, t.rows, t.position - len(t.rows)) for t in self.texts if t.rows is not None]
        if sent:
            models.backbone.extend(sent)
            for text in self.texts:
                text.rows = None
        anchors = [text.anchor for text in self.texts]
        positions = [text.position for text in self.texts]
        hidden = models.backbone.block([text.key for text in self.texts], anchors, positions, arch.block_size)
        law = DraftLaw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, noise=None, count=self._k)
        drafted = models.selector.propose(hidden[:, arch.first_slot :], anchors, [law] * len(anchors))
        return [Draft(d.token_ids, None, d.signals) for d in drafted]

    def plan(self, drafts: list[Draft]) -> ForwardBatch:
        """The batch that verifies `drafts`, on the device."""
        works = [
            Work([text.anchor, *draft.token_ids], text.position, 1 + len(draft), text.pages)
            for text, draft in zip(self.texts, drafts, strict=True)
        ]
        forward, self._order = batch.plan(works, self._models.layout)
        return moved(forward, self._models.device)

    def forward(self, planned: ForwardBatch) -> tuple[Tensor, Tensor]:
        """The target's pass: logits [n, V], and the rows [n, h] made of what was tapped."""
        models = self._models
        taps = models.shape.drafter.taps
        logits, tapped = models.target.forward_tapped(planned, models.caches, None, taps)
        return logits, models.projection(tapped)

    def block(self) -> Callable[[], Tensor]:
        """The drafter's pass over everybody's block, planned once, to be run as often as wanted."""
        models, keys = self._models, [text.key for text in self.texts]
        planned = models.backbone.plan_block(keys, [t.anchor for t in self.texts], models.shape.drafter.block_size)
        models.draft_kv.crop(keys)  # its cells stay unused as long as nobody else takes some
        return lambda: models.backbone.run_block(planned)

    @torch.inference_mode()
    def verify(self, drafts: list[Draft]) -> None:
        """One pass over everybody's anchor and draft."""
        self._logits, self._rows = self.forward(self.plan(drafts))

    @torch.inference_mode()
    def accept(self, drafts: list[Draft]) -> int:
        """Accepts greedily and commits; returns how many tokens."""
        verdicts = self.judge(drafts, 0.0)
        row = 0
        for i, tokens in zip(self._order, verdicts, strict=True):
            text = self.texts[i]
            # Nobody asks the drafter with K = 0; the rows that it lacks are then not kept.
            text.rows = self._rows[row : row + len(tokens)] if self._k else None
            text.tokens += tokens
            row += 1 + len(drafts[i])
        return sum(map(len, verdicts))

    @torch.inference_mode()
    def judge(self, drafts: list[Draft], temperature: float) -> list[list[int]]:
        """The tokens to commit by rule `match`, in the order of the batch."""
        return judge(self._logits, [self._trial(self.texts[i], drafts[i], temperature) for i in self._order])

    def _trial(self, text: Text, draft: Draft, temperature: float) -> Trial:
        first = text.position + 1
        laws = [RowLaw(temperature, 0, 1.0, seed=text.key, position=first + row) for row in range(1 + len(draft))]
        return Trial(draft, laws)
