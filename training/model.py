"""The drafter as it is trained: parameters under their published names, many blocks of a sequence in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kadence.errors import CheckpointError
from services.drafter.draft_arch import DraftArch
from services.kernels import gradients
from services.model.rope import frequencies


@dataclass(frozen=True)
class Context:
    """What blocks see: rows [B * T, h] of their sequences, turned by `turn`; their own rows by `block_turn`.

    anchors int64 [B, N]: how many rows of its sequence each block sees.
    """

    rows: Tensor
    anchors: Tensor
    turn: Turn
    block_turn: Turn


@dataclass(frozen=True)
class Blocks:
    """N blocks of each of B sequences that end before length T.

    taps [B, T, M * h_target]; anchors int64 [B, N]: where each block begins; a block sees the rows before its anchor,
    and itself. tokens int64 [B, N]: the anchors' ids.
    """

    taps: Tensor
    anchors: Tensor
    tokens: Tensor


class Convolution(nn.Module):
    """Grouped dynamic causal convolution over a block's slots (draft-model contracts, section 4.1)."""

    def __init__(self, arch: DraftArch) -> None:
        super().__init__()
        self._slots, self._taps = arch.block_size, arch.conv_taps
        self._groups = arch.hidden_size // arch.conv_group
        base = torch.zeros(2, arch.conv_taps, arch.hidden_size)
        base[:, 0] = 1  # the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(arch.hidden_size, 2 * arch.conv_taps * self._groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def around(self, y: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer with its input y [n, h] and its output convolved by weights that y gives."""
        dynamic = linear(self.kernel_projection, y).view(len(y), 2, self._taps, self._groups)
        before, after = self.base_kernel.to(y.dtype)
        y = gradients.convolve(y, before, dynamic[:, 0], self._slots)
        return gradients.convolve(sublayer(y), after, dynamic[:, 1], self._slots)


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return gradients.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self._eps).view(x.shape)


class Attention(nn.Module):
    """Of a block's rows over its context and itself (draft-model contracts, sections 3.2 to 3.4)."""

    def __init__(self, a: DraftArch) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._d, self._slots = a.num_heads, a.num_kv_heads, a.head_dim, a.block_size
        self.q_proj = nn.Linear(a.hidden_size, a.num_heads * a.head_dim, bias=False)
        self.k_proj = nn.Linear(a.hidden_size, a.num_kv_heads * a.head_dim, bias=False)
        self.v_proj = nn.Linear(a.hidden_size, a.num_kv_heads * a.head_dim, bias=False)
        self.o_proj = nn.Linear(a.num_heads * a.head_dim, a.hidden_size, bias=False)
        self.q_norm, self.k_norm = Norm(a.head_dim, a.rms_norm_eps), Norm(a.head_dim, a.rms_norm_eps)

    def forward(self, y: Tensor, context: Context, own: list[float] | None) -> Tensor:
        """y [B * N * m, h] -> the same shape. own, if given, gets the mean share of attention inside the block."""
        b, n = context.anchors.shape
        kv, d, group, m = self._kv_heads, self._d, self._heads // self._kv_heads, self._slots
        far_k, far_v = self._keys(context.rows, (self.k_proj, self.v_proj), context.turn)
        far_k, far_v = (x.view(b, -1, kv, d).transpose(1, 2) for x in (far_k, far_v))  # [B, Hkv, T, d]
        q, k, v = self._queries(y, context.block_turn)
        # GQA by folding: the queries of a KV head's group stand below each other, [B, Hkv, g, N, m, d].
        q = q.view(b, n, m, kv, group, d).permute(0, 3, 4, 1, 2, 5) * d**-0.5
        far = torch.bmm(q.reshape(b * kv, -1, d), far_k.reshape(b * kv, -1, d).mT)
        # Inside the block: [B, Hkv, N, g * m, d] by [B, Hkv, N, d, m].
        k, v = (x.view(b, n, m, kv, d).permute(0, 3, 1, 2, 4).reshape(-1, m, d) for x in (k, v))
        near = torch.bmm(q.transpose(2, 3).reshape(-1, group * m, d), k.mT)
        near = near.view(b, kv, n, group, m, m).transpose(2, 3)
        rows = (b, kv * group, n * m)
        p_far, p_near = gradients.block_softmax(far.view(*rows, -1), near.reshape(*rows, m), context.anchors)
        if own is not None:
            own.append(float(p_near.detach().float().sum(-1).mean()))
        out = torch.bmm(p_far.view(b * kv, group * n * m, -1), far_v.reshape(b * kv, -1, d)).view(b, kv, group, n, m, d)
        p_near = p_near.view(b, kv, group, n, m, m).transpose(2, 3)
        inside = torch.bmm(p_near.reshape(-1, group * m, m), v).view(b, kv, n, group, m, d).transpose(2, 3)
        return linear(self.o_proj, (out + inside).permute(0, 3, 4, 1, 2, 5).reshape(b * n * m, -1))

    def _queries(self, y: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv, d = self._heads, self._kv_heads, self._d
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(y.dtype)
        q, k, v = F.linear(y, weight).view(len(y), -1, d).split([heads, kv, kv], dim=1)
        return turn(self.q_norm(q)), turn(self.k_norm(k)), v

    def _keys(self, rows: Tensor, projections: tuple[nn.Linear, nn.Linear], turn: Turn) -> tuple[Tensor, Tensor]:
        k, v = (linear(projection, rows).view(len(rows), self._kv_heads, self._d) for projection in projections)
        return turn(self.k_norm(k)), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, arch: DraftArch) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        weight = torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(y.dtype)
        return linear(self.down_proj, gradients.silu_mul(F.linear(y, weight)))


class Layer(nn.Module):
    """Attention and MLP, each between its convolutions, if there are any."""

    def __init__(self, arch: DraftArch) -> None:
        super().__init__()
        self.input_layernorm = Norm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(arch)
        self.post_attention_layernorm = Norm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MLP(arch)
        self.attention_conv = Convolution(arch) if arch.conv_taps else None
        self.mlp_conv = Convolution(arch) if arch.conv_taps else None

    def forward(self, x: Tensor, context: Context, own: list[float] | None) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            return self.self_attn(y, context, own)

        for conv, norm, sublayer in (
            (self.attention_conv, self.input_layernorm, attend),
            (self.mlp_conv, self.post_attention_layernorm, self.mlp),
        ):
            y = norm(x)
            x = x + (sublayer(y) if conv is None else conv.around(y, sublayer))
        return x


class Selector(nn.Module):
    """Low-rank edges between neighbouring candidates (draft-model contracts, section 4.2), for `size` ids."""

    def __init__(self, arch: DraftArch, size: int) -> None:
        super().__init__()
        rank = arch.selector_rank
        self.hidden_projection = nn.Linear(arch.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(size, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.zeros(size, rank))  # so that it begins as none at all

    def edges(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """hidden [n, h], before int64 [n] (-1: an id without a row), candidates int64 [n, k] -> float32 [n, k]."""
        known = F.embedding(before.clamp(min=0), self.predecessor_codebook)
        pair = linear(self.hidden_projection, hidden).float() * known
        scores = torch.einsum("nr,nkr->nk", pair, F.embedding(candidates, self.successor_codebook))
        return scores * (before >= 0)[:, None]


class DraftModel(nn.Module):
    """A DFlash 2 drafter, or a DFlash one if `arch` has neither convolution nor selector."""

    def __init__(self, arch: DraftArch, embedding: Tensor, vocabulary_size: int) -> None:
        """embedding [V, h]: the target's, not trained; the selector knows `vocabulary_size` ids.

        Raises CheckpointError naming what of the shape cannot be trained.
        """
        super().__init__()
        _check(arch)
        self.arch = arch
        self._embedding: Tensor
        self.register_buffer("_embedding", embedding, persistent=False)
        self.fc = nn.Linear(len(arch.taps) * arch.target_hidden_size, arch.hidden_size, bias=False)
        self.hidden_norm = Norm(arch.hidden_size, arch.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.num_layers))
        self.norm = Norm(arch.hidden_size, arch.rms_norm_eps)
        self.candidate_selector = Selector(arch, vocabulary_size) if arch.selector_rank else None

    def forward(self, blocks: Blocks, own: list[float] | None = None) -> Tensor:
        """Final-normed hidden rows [B, N, m, h], in the dtype of the taps. own: see `Attention.forward`."""
        a, (b, n), (_, t, width) = self.arch, blocks.anchors.shape, blocks.taps.shape
        device, dtype = blocks.taps.device, blocks.taps.dtype
        slots = torch.arange(a.block_size, device=device)
        context = Context(
            self.hidden_norm(linear(self.fc, blocks.taps.view(-1, width))),
            blocks.anchors,
            Turn(a, torch.arange(t, device=device).repeat(b), dtype),
            Turn(a, (blocks.anchors[..., None] + slots).flatten(), dtype),
        )
        ids = blocks.tokens.new_full((b * n, a.block_size), a.mask_token_id or 0)
        ids[:, 0] = blocks.tokens.flatten()
        x = F.embedding(ids.flatten(), self._embedding).to(dtype)
        for layer in self.layers:
            x = layer(x, context, own)
        return self.norm(x).view(b, n, a.block_size, -1)


class Turn:
    """Rotary embedding of rows at given positions (NeoX layout)."""

    def __init__(self, arch: DraftArch, positions: Tensor, dtype: torch.dtype) -> None:
        """positions int64 [n]"""
        angle = positions[:, None].float() * frequencies(arch.head_dim, arch.rope).to(positions.device)
        self._cos = torch.cat([angle.cos(), angle.cos()], dim=-1).to(dtype)
        self._sin = angle.sin().to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, heads, d] -> the same shape"""
        return gradients.rotate(x, self._cos, self._sin)


def _check(a: DraftArch) -> None:
    """Refuses what published drafters may have, and this model has not."""
    odd = {
        "sliding windows": any(a.windows),
        "causal blocks": any(a.causal),
        "slot 0 that drafts": a.first_slot != 1,
        "attention_bias": a.attention_bias,
        "a scaled rotary embedding": a.rope.scaling is not None,
        "input_embedding_scale": a.embedding_scale != 1,
        "output_multiplier": a.output_multiplier != 1,
        "final_logit_softcapping": a.softcap != 0,
        "a mask embedding of its own": a.mask_token_id is None,
        "an embedding table of its own": a.own_embedding,
    }
    if found := [name for name, there in odd.items() if there]:
        raise CheckpointError(f"a drafter with {found[0]} cannot be trained")


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in the dtype of x [n, in], whatever its weight is kept in."""
    return F.linear(x, layer.weight.to(x.dtype))
