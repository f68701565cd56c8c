"""The target model: loads a folder of one of the supported families and runs one ragged batch through it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from services.kernels.ragged_attention import AttentionBlocks, RaggedAttention
from services.kernels.ragged_attention_ref import AttentionGroup, ragged_attention
from services.kernels.row_passes import silu_mul
from services.model.arch import Arch, read_arch
from services.model.dtypes import resolve_dtype
from services.model.linear import Linear, padded
from services.model.norm import RMSNorm
from services.model.rope import Rope, rotate
from services.model.source import Source
from services.model.weights import Checkpoint


@dataclass(frozen=True)
class Layer:
    """One decoder layer, projections that read the same input fused."""

    input_norm: RMSNorm
    qkv: Linear  # h -> (Hq + 2 Hkv) * d
    qk_norm: RMSNorm | None  # over d of each of Hq + Hkv heads
    out: Linear  # Hq * d -> h
    post_norm: RMSNorm
    gate_up: Linear  # h -> 2 * I
    down: Linear  # I -> h


@dataclass(frozen=True)
class ForwardBatch:
    """One step's rows. n rows in all; s of them need logits.

    tokens [n], positions [n]: what runs where. slots [n * 2 * Hkv]: rows of the cache viewed as [-1, d] that receive
    each row's K heads, then V heads. sample_rows [s]: rows whose logits are wanted. Attention is planned as `blocks`
    for the native kernel, else as padded `groups` for the reference.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    groups: list[AttentionGroup]
    blocks: AttentionBlocks | None
    sample_rows: Tensor

    @property
    def cells(self) -> Tensor:
        """Cache slot of each row, page * page_size + offset, [n]: the cells of the first K head."""
        return self.slots.view(self.tokens.numel(), -1)[:, 0]


class Target:
    """Weights and forward pass. Holds no request state."""

    def __init__(self, folder: Path, dtype: str) -> None:
        arch = read_arch(folder)
        with Checkpoint(folder) as checkpoint:
            self._load(arch, checkpoint, resolve_dtype(dtype))
            self.fingerprint = checkpoint.finish(ignore=["lm_head.weight"] if arch.tied_head else [])

    @classmethod
    def built(cls, arch: Arch, source: Source, dtype: torch.dtype) -> Target:
        """A target of `source`'s tensors, on their device; nobody can tell them from others, so no fingerprint."""
        target = cls.__new__(cls)
        target._load(arch, source, dtype)
        target.fingerprint = ""
        return target

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where batches and caches must be."""
        return self._embedding.device

    def prepare(self, max_position: int) -> None:
        """Readies positions [0, max_position); before the first `forward`."""
        self._rope = Rope(self.arch.head_dim, self.arch.rope, max_position, self.dtype, self.device)

    @torch.inference_mode()
    def warm(self, max_rows: int) -> None:
        """Runs each kind of linear layer once at each size that steps of up to `max_rows` rows can have."""
        if not self._head.packed:
            return
        layer = self._layers[0]  # kernels are made per shape, and all layers have the same
        for rows in sorted({padded(n) for n in range(1, max_rows + 1)}):
            for linear in (layer.qkv, layer.gate_up, self._head):
                linear(torch.zeros((rows, linear.in_features), dtype=self.dtype))
            for linear in (layer.out, layer.down):
                x = torch.zeros((rows, linear.in_features), dtype=self.dtype)
                linear.add_to(torch.zeros((rows, linear.out_features), dtype=self.dtype), x)

    def _load(self, arch: Arch, source: Source, dtype: torch.dtype) -> None:
        self.arch, self.dtype, a = arch, dtype, arch
        self._embedding = source.take("model.embed_tokens.weight", (a.vocab_size, a.hidden_size), dtype)
        self._layers = [_load_layer(source, a, f"model.layers.{i}.", dtype) for i in range(a.num_layers)]
        self._norm = RMSNorm(source.take("model.norm.weight", (a.hidden_size,), dtype), a.rms_norm_eps)
        head = self._embedding
        if not a.tied_head:
            head = source.take("lm_head.weight", (a.vocab_size, a.hidden_size), dtype)
        self._head = Linear(head)

    def forward(self, batch: ForwardBatch, caches: list[Tensor], kernel: RaggedAttention | None = None) -> Tensor:
        """Runs the rows, writing their K/V into `caches` (see paged_kv.allocate_caches); returns logits [s, V]."""
        return self.forward_tapped(batch, caches, kernel, ())[0]

    @torch.inference_mode()
    def forward_tapped(
        self, batch: ForwardBatch, caches: list[Tensor], kernel: RaggedAttention | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """As `forward`; also the residual stream [n, h] after each layer of `taps`, which ascend and count from 0
        (draft-model contracts, section 3.1).
        """
        a, n = self.arch, batch.tokens.numel()
        rows = padded(n) if self._head.packed else n
        cos, sin = self._rope.rows(F.pad(batch.positions, (0, rows - n)))
        x = F.embedding(F.pad(batch.tokens, (0, rows - n)), self._embedding)  # [rows, h]; beyond n nobody looks
        rotated = a.num_heads + a.num_kv_heads
        tapped = []
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            qkv = layer.qkv(layer.input_norm(x)).view(x.shape[0], rotated + a.num_kv_heads, a.head_dim)
            qk = qkv[:, :rotated]
            qk = rotate(qk if layer.qk_norm is None else layer.qk_norm(qk), cos, sin)
            kv = torch.cat([qk[:, a.num_heads :], qkv[:, rotated:]], dim=1)  # [n, 2 Hkv, d]
            cache.view(-1, a.head_dim).index_copy_(0, batch.slots, kv[:n].view(-1, a.head_dim))
            q = qk[:n, : a.num_heads]
            if kernel is not None and batch.blocks is not None:
                attended = kernel(q, cache, batch.blocks, rows)
            else:
                attended = ragged_attention(q, cache, batch.groups, a.num_kv_heads, a.head_dim)
                attended = F.pad(attended, (0, 0, 0, rows - n))
            x = layer.out.add_to(x, attended)
            x = layer.down.add_to(x, silu_mul(layer.gate_up(layer.post_norm(x))))
            if index in taps:
                tapped.append(x[:n])
        samples = batch.sample_rows.numel()
        if samples == 0:  # prefill chunks only
            return x.new_empty((0, a.vocab_size)), tapped
        wanted = padded(samples) if self._head.packed else samples
        sampled = x.index_select(0, F.pad(batch.sample_rows, (0, wanted - samples)))
        return self._head(self._norm(sampled))[:samples], tapped


def _load_layer(source: Source, a: Arch, prefix: str, dtype: torch.dtype) -> Layer:
    h, q, kv, i = a.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.intermediate_size

    def norm(name: str) -> RMSNorm:
        return RMSNorm(source.take(f"{prefix}{name}.weight", (h,), dtype), a.rms_norm_eps)

    def linear(in_features: int, bias: bool, parts: dict[str, int]) -> Linear:
        """The projections of one input, `parts` with their output sizes, as one."""
        sizes = {f"{prefix}{name}_proj": size for name, size in parts.items()}
        weights = [source.take(f"{name}.weight", (size, in_features), dtype) for name, size in sizes.items()]
        biases = [source.take(f"{name}.bias", (size,), dtype) for name, size in sizes.items() if bias]
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=linear(h, a.qkv_bias, {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv}),
        qk_norm=_load_qk_norm(source, a, prefix, dtype) if a.qk_norm else None,
        out=linear(q, a.out_bias, {"self_attn.o": h}),
        post_norm=norm("post_attention_layernorm"),
        gate_up=linear(h, a.mlp_bias, {"mlp.gate": i, "mlp.up": i}),
        down=linear(i, a.mlp_bias, {"mlp.down": h}),
    )


def _load_qk_norm(source: Source, a: Arch, prefix: str, dtype: torch.dtype) -> RMSNorm:
    """The norms of queries and keys as one over all heads, [Hq + Hkv, d]."""
    q, k = (source.take(f"{prefix}self_attn.{name}_norm.weight", (a.head_dim,), dtype) for name in "qk")
    return RMSNorm(torch.cat([q.expand(a.num_heads, -1), k.expand(a.num_kv_heads, -1)]), a.rms_norm_eps)
