"""The drafter's decoder: context K/V from the target's feature rows, and one pass over the blocks of many sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.drafter.draft_kv import DraftKV, Span
from services.drafter.draft_weights import ConvWeights, DraftLayer, DraftWeights
from services.kernels.attention_plan import AttentionPlan, cache_cells, plan_attention
from services.kernels.device import moved
from services.kernels.local_convolution import LocalConvolution
from services.kernels.ragged_attention_ref import ragged_attention
from services.kernels.row_passes import silu_mul
from services.model.linear import Linear, padded
from services.model.rope import Rope, rotate

_ROPE_POSITIONS = 1024


@dataclass(frozen=True)
class ContextBatch:
    """Context rows [n, h] with their positions [n], and the cells [n * 2 * Hkv] that take K and V of one layer."""

    rows: Tensor
    positions: Tensor
    cells: Tensor


@dataclass(frozen=True)
class BlockBatch:
    """The blocks of one round, `slots` rows each: token ids [n], positions [n], cells as above.

    attention: one plan per pair (causal, window) that layers have. order: which session each block is of.
    """

    slots: int
    ids: Tensor
    positions: Tensor
    cells: Tensor
    attention: dict[tuple[bool, int], AttentionPlan]
    order: list[int]


class Backbone:
    """Weights and forward pass (draft-model contracts, sections 3 and 4.1); `kv` is what it knows of sessions."""

    def __init__(self, weights: DraftWeights, embedding: Tensor, kv: DraftKV) -> None:
        """embedding [V, h]: the target's, or the checkpoint's own."""
        self._weights, self._embedding, self._kv = weights, embedding, kv
        self._arch = arch = weights.arch
        self._views = list(zip(arch.causal, arch.windows, strict=True))
        self._packed = weights.layers[0].qkv.packed
        self._rope_positions = 0
        self._convolution: LocalConvolution | None = None
        if arch.conv_taps:
            self._convolution = LocalConvolution(embedding.dtype, embedding.device, arch.conv_taps, arch.conv_group)

    def extend(self, appends: Sequence[tuple[int, Tensor, int]]) -> None:
        """Appends (session's key, projected feature rows [n, h], position of the first) to the sessions' contexts."""
        spans = [(self._kv.append(key, base, len(rows)), rows) for key, rows, base in appends]
        spans = [(span, rows[len(rows) - span.rows :]) for span, rows in spans if span.rows]
        if spans:
            self.run_context(self._plan_context([span for span, _ in spans], torch.cat([rows for _, rows in spans])))

    def block(self, keys: Sequence[int], anchors: Sequence[int], positions: Sequence[int], slots: int) -> Tensor:
        """One pass over a block of `slots` rows per session, anchor first: final-normed hidden rows [R, slots, h].

        positions: where each anchor stands, which is the number of rows that its session has.
        """
        assert list(positions) == [self._kv.length(key) for key in keys], "a session's rows do not reach its anchor"
        assert max(positions) < self._arch.max_position, f"an anchor beyond position {self._arch.max_position}"
        try:
            batch = self.plan_block(keys, anchors, slots)
            hidden = self.run_block(batch).view(len(keys), slots, -1)
        finally:
            self._kv.crop(keys)
        if batch.order == sorted(batch.order):
            return hidden
        return hidden[torch.from_numpy(np.argsort(batch.order)).to(hidden.device)]

    def plan_block(self, keys: Sequence[int], anchors: Sequence[int], slots: int) -> BlockBatch:
        """One round's batch; its cells are reserved, and are to be cropped by whoever asked."""
        spans, layout = self._kv.reserve(keys, slots), self._kv.layout
        attention = {view: plan_attention(spans, layout, *view) for view in dict.fromkeys(self._views)}
        order = next(iter(attention.values())).order
        ids = np.full((len(keys), slots), self._arch.mask_token_id or 0, dtype=np.int64)
        ids[:, 0] = [anchors[i] for i in order]
        ordered = [spans[i] for i in order]
        positions = torch.from_numpy(_positions(ordered))
        self._reach(int(positions.max()))
        tensors = torch.from_numpy(ids.reshape(-1)), positions, cache_cells(ordered, layout)
        ids_, positions, cells, plans = moved((*tensors, list(attention.values())), self._embedding.device)
        return BlockBatch(slots, ids_, positions, cells, dict(zip(attention, plans, strict=True)), order)

    @torch.inference_mode()
    def run_context(self, batch: ContextBatch) -> None:
        """Computes and writes K and V of context rows, of every layer."""
        n, kv_heads, d = len(batch.positions), self._arch.num_kv_heads, self._arch.head_dim
        extra = self._rows(n) - n
        cos, sin = self._rope.rows(F.pad(batch.positions, (0, extra)))
        rows = F.pad(batch.rows, (0, 0, 0, extra))
        for layer, cache in zip(self._weights.layers, self._kv.caches, strict=True):
            kv = layer.kv(rows).view(n + extra, 2 * kv_heads, d)
            kv[:, :kv_heads] = rotate(layer.k_norm(kv[:, :kv_heads]), cos, sin)
            _write(cache, batch.cells, kv[:n])

    @torch.inference_mode()
    def run_block(self, batch: BlockBatch) -> Tensor:
        """Hidden rows [n, h] of the blocks, in the batch's order."""
        n = len(batch.ids)
        extra = self._rows(n) - n
        cos, sin = self._rope.rows(F.pad(batch.positions, (0, extra)))
        x = self._embed(F.pad(batch.ids, (0, extra)), batch.slots)
        for layer, cache, view in zip(self._weights.layers, self._kv.caches, self._views, strict=True):
            x = self._attention(layer, cache, batch, batch.attention[view], x, (cos, sin))
            x = self._mlp(layer, x, batch.slots)
        return self._weights.norm(x)[:n]

    def _attention(
        self,
        layer: DraftLayer,
        cache: Tensor,
        batch: BlockBatch,
        plan: AttentionPlan,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
    ) -> Tensor:
        a, n, rows = self._arch, len(batch.ids), len(x)
        y, dynamic = self._prepare(layer.attention_conv, layer.input_norm(x), batch.slots)
        rotated = a.num_heads + a.num_kv_heads
        qkv = layer.qkv(y).view(rows, rotated + a.num_kv_heads, a.head_dim)
        qk = rotate(layer.qk_norm(qkv[:, :rotated]), *turn)
        kv = torch.cat([qk[:, a.num_heads :], qkv[:, rotated:]], dim=1)
        _write(cache, batch.cells, kv[:n])
        q = qk[:n, : a.num_heads]
        if self._kv.kernel is not None and plan.blocks is not None:
            attended = self._kv.kernel(q, cache, plan.blocks, rows)
        else:
            attended = ragged_attention(q, cache, plan.groups, a.num_kv_heads, a.head_dim)
            attended = F.pad(attended, (0, 0, 0, rows - n))
        return self._finish(layer.attention_conv, layer.out, attended, x, dynamic, batch.slots)

    def _mlp(self, layer: DraftLayer, x: Tensor, slots: int) -> Tensor:
        y, dynamic = self._prepare(layer.mlp_conv, layer.post_norm(x), slots)
        return self._finish(layer.mlp_conv, layer.down, silu_mul(layer.gate_up(y)), x, dynamic, slots)

    def _prepare(self, conv: ConvWeights | None, y: Tensor, slots: int) -> tuple[Tensor, Tensor | None]:
        """The sublayer's input, and the weights [n, 2, t, G] that its output will be convolved with too."""
        if conv is None or self._convolution is None:
            return y, None
        dynamic = conv.projection(y).view(len(y), 2, self._arch.conv_taps, -1)
        return self._convolution(y, slots, conv.base[0], dynamic[:, 0]), dynamic

    def _finish(
        self, conv: ConvWeights | None, out: Linear, y: Tensor, x: Tensor, dynamic: Tensor | None, slots: int
    ) -> Tensor:
        """The sublayer's last projection, convolved, added to the residual stream x."""
        if conv is None or self._convolution is None or dynamic is None:
            return out.add_to(x, y)
        return self._convolution(out(y), slots, conv.base[1], dynamic[:, 1], residual=x)

    def _embed(self, ids: Tensor, slots: int) -> Tensor:
        x = F.embedding(ids, self._embedding)
        if self._weights.mask_embedding is not None:
            masked = torch.arange(len(ids), device=ids.device) % slots != 0
            x = torch.where(masked[:, None], self._weights.mask_embedding, x)
        return x * self._arch.embedding_scale if self._arch.embedding_scale != 1 else x

    def _plan_context(self, spans: list[Span], rows: Tensor) -> ContextBatch:
        positions = torch.from_numpy(_positions(spans))
        self._reach(int(positions.max()))
        return moved(ContextBatch(rows, positions, cache_cells(spans, self._kv.layout)), self._embedding.device)

    def _reach(self, position: int) -> None:
        """Makes the rotary table long enough for a position."""
        if position < self._rope_positions:
            return
        arch, table = self._arch, self._embedding
        self._rope_positions = max(_ROPE_POSITIONS, 1 << position.bit_length())
        self._rope = Rope(arch.head_dim, arch.rope, self._rope_positions, table.dtype, table.device)

    def _rows(self, n: int) -> int:
        return padded(n) if self._packed else n


def _write(cache: Tensor, cells: Tensor, kv: Tensor) -> None:
    """K and V [n, 2 * Hkv, d] into their cells, numbers only.

    Cells outlive their session, and attention multiplies those that it masks by zero: what is not finite in one, whose
    rows come over the wire, would spoil the sessions that get its pages later.
    """
    d = kv.shape[-1]
    cache.view(-1, d).index_copy_(0, cells, torch.nan_to_num(kv, nan=0.0, posinf=0.0, neginf=0.0).view(-1, d))


def _positions(spans: Sequence[Span]) -> np.ndarray:
    return np.concatenate([np.arange(span.position, span.position + span.rows) for span in spans])
