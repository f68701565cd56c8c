"""Reads a drafter's safetensors: the exact inventory of its family under any published naming, as fused layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kadence.errors import CheckpointError
from services.drafter.draft_arch import DraftArch
from services.model.linear import Linear
from services.model.norm import RMSNorm
from services.model.projection import ProjectionWeights
from services.model.source import Source
from services.model.weights import Checkpoint

MASK_FILE = "mask_embedding.pt"
_PREFIXES = ("model.", "logit_head.")


@dataclass(frozen=True, eq=False)
class ConvWeights:
    """A grouped dynamic convolution around one sublayer (draft-model contracts, section 4.1)."""

    base: Tensor
    """[2, t, h]: before and after the sublayer; tap j is for the row j positions earlier."""
    projection: Linear
    """h -> 2 * t * G, side by side, then tap, then group"""
    group: int
    """Channels that share a dynamic coefficient."""


@dataclass(frozen=True, eq=False)
class DraftLayer:
    """One layer, projections that read the same input fused."""

    input_norm: RMSNorm
    qkv: Linear  # h -> (Hq + 2 Hkv) * d
    qk_norm: RMSNorm  # over d of each of Hq + Hkv heads
    kv: Linear  # h -> 2 * Hkv * d: the rows of k and v alone, for context rows
    k_norm: RMSNorm  # over d of each of Hkv heads
    out: Linear  # Hq * d -> h
    post_norm: RMSNorm
    gate_up: Linear  # h -> 2 * I
    down: Linear  # I -> h
    attention_conv: ConvWeights | None
    mlp_conv: ConvWeights | None


@dataclass(frozen=True, eq=False)
class SelectorWeights:
    """The low-rank edge scores of the candidate selector (draft-model contracts, section 4.2)."""

    hidden_projection: Linear
    """h -> r"""
    predecessor: Tensor
    """[V, r]"""
    successor: Tensor
    """[V, r]"""


@dataclass(frozen=True, eq=False)
class DraftWeights:
    """A drafter, ready to run. Tables that the checkpoint lacks are the target's."""

    arch: DraftArch
    layers: list[DraftLayer]
    norm: RMSNorm
    selector: SelectorWeights | None
    projection: ProjectionWeights
    embedding: Tensor | None = None
    """[V, h]"""
    head: Tensor | None = None
    """[V, h]"""
    mask_embedding: Tensor | None = None
    """[h], in place of the mask token's row"""


def load_draft(folder: Path, arch: DraftArch, dtype: torch.dtype) -> DraftWeights:
    """Every tensor of `folder` as `dtype`, the projection's as stored.

    Raises CheckpointError naming file and tensor if one is missing, unexpected, or of another shape.
    """
    vocab, h = arch.vocab_size, arch.hidden_size
    with Checkpoint(folder) as checkpoint:
        tensors = _Published(checkpoint, arch)
        weights = build_draft(tensors, arch, dtype, _projection(partial(tensors.take, dtype=None), arch))
        embedding = tensors.optional("embed_tokens.weight", (vocab, h), dtype)
        if embedding is None and arch.own_embedding:
            raise CheckpointError(f"{folder}: tensor embed_tokens.weight is missing, but has_embed_tokens is true")
        mask = tensors.optional("mask_embedding", None, dtype)
        head = tensors.optional("lm_head.weight", (vocab, h), dtype)
        checkpoint.finish()
    if (folder / MASK_FILE).exists():
        if mask is not None:
            raise CheckpointError(f"{folder}: a mask embedding is both among the tensors and in {MASK_FILE}")
        mask = _finite(_read_mask(folder / MASK_FILE).to(dtype), folder / MASK_FILE, "mask_embedding")
    if mask is not None and mask.numel() != h:
        raise CheckpointError(f"{folder}: the mask embedding has {mask.numel()} values, expected hidden_size, {h}")
    if mask is None and arch.mask_token_id is None:
        raise CheckpointError(f"{folder / 'config.json'}: mask_token_id is missing, and there is no {MASK_FILE}")
    return replace(weights, embedding=embedding, head=head, mask_embedding=None if mask is None else mask.reshape(h))


def build_draft(
    source: Source, arch: DraftArch, dtype: torch.dtype, projection: ProjectionWeights | None = None
) -> DraftWeights:
    """A drafter of tensors under their published names, without tables; `projection` is taken in `dtype` if None."""
    rank, h = arch.selector_rank, arch.hidden_size
    layers = [_load_layer(source, arch, f"layers.{i}.", dtype) for i in range(arch.num_layers)]
    selector = None
    if rank:
        name = "candidate_selector."
        selector = SelectorWeights(
            Linear(source.take(f"{name}hidden_projection.weight", (rank, h), dtype)),
            source.take(f"{name}predecessor_codebook", (arch.vocab_size, rank), dtype),
            source.take(f"{name}successor_codebook", (arch.vocab_size, rank), dtype),
        )
    return DraftWeights(
        arch=arch,
        layers=layers,
        norm=RMSNorm(source.take("norm.weight", (h,), dtype), arch.rms_norm_eps),
        selector=selector,
        projection=projection or _projection(partial(source.take, dtype=dtype), arch),
    )


class _Published:
    """A checkpoint under the names of draft-model contracts, section 2, whatever the file calls them."""

    def __init__(self, checkpoint: Checkpoint, arch: DraftArch) -> None:
        self._checkpoint = checkpoint
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self._rows = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
        self._stored: dict[str, str] = {}
        for stored in checkpoint.names():
            name = _plain(stored)
            if name in self._stored:
                raise CheckpointError(f"{checkpoint.listing}: tensors {self._stored[name]} and {stored} are the same")
            self._stored[name] = stored

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        """See Checkpoint.take; q, k and v may be one tensor."""
        for part, (begin, end) in self._rows.items():
            fused = name.replace(f".{part}.", ".qkv_proj.")
            if fused != name and name not in self._stored and fused in self._stored:
                whole = (self._rows["v_proj"][1], *shape[1:])
                return self._take(self._stored[fused], whole, dtype)[begin:end]
        return self._take(self._stored.get(name, name), shape, dtype)

    def optional(self, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
        """The tensor if the file has it; of any shape if `shape` is None."""
        return self._take(self._stored[name], shape, dtype) if name in self._stored else None

    def _take(self, stored: str, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Tensor:
        return _finite(self._checkpoint.take(stored, shape, dtype), self._checkpoint.listing, stored)


def _plain(name: str) -> str:
    """The published name of a tensor that a file may call otherwise."""
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    name = name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
    bare = name.removesuffix(".weight")
    return bare if bare.endswith("_codebook") or bare == "mask_embedding" else name


def _projection(take: Callable[[str, tuple[int, ...]], Tensor], a: DraftArch) -> ProjectionWeights:
    """The weights that make feature rows."""
    fc = take("fc.weight", (a.hidden_size, len(a.taps) * a.target_hidden_size))
    return ProjectionWeights(taps=a.taps, fc=fc, norm=take("hidden_norm.weight", (a.hidden_size,)), eps=a.rms_norm_eps)


def _load_layer(source: Source, a: DraftArch, prefix: str, dtype: torch.dtype) -> DraftLayer:
    h, d, i = a.hidden_size, a.head_dim, a.intermediate_size
    q, kv = a.num_heads * d, a.num_kv_heads * d

    def norm(name: str) -> RMSNorm:
        return RMSNorm(source.take(f"{prefix}{name}.weight", (h,), dtype), a.rms_norm_eps)

    def linear(in_features: int, parts: dict[str, int], bias: bool = False) -> list[Linear]:
        """The projections of one input, `parts` with their output sizes, as one; and all but the first as another."""
        sizes = {f"{prefix}{name}_proj": size for name, size in parts.items()}
        weights = [source.take(f"{name}.weight", (size, in_features), dtype) for name, size in sizes.items()]
        biases = [source.take(f"{name}.bias", (size,), dtype) for name, size in sizes.items() if bias]
        wanted = [0] if len(weights) < 3 else [0, 1]
        return [Linear(torch.cat(weights[n:]), torch.cat(biases[n:]) if bias else None) for n in wanted]

    def heads(weight: Tensor, count: int) -> Tensor:
        return weight.expand(count, -1)

    q_norm, k_norm = (source.take(f"{prefix}self_attn.{name}_norm.weight", (d,), dtype) for name in "qk")
    parts = {"self_attn.q": q, "self_attn.k": kv, "self_attn.v": kv}
    qkv, context = linear(h, parts, a.attention_bias)
    return DraftLayer(
        input_norm=norm("input_layernorm"),
        qkv=qkv,
        qk_norm=RMSNorm(torch.cat([heads(q_norm, a.num_heads), heads(k_norm, a.num_kv_heads)]), a.rms_norm_eps),
        kv=context,
        k_norm=RMSNorm(heads(k_norm, a.num_kv_heads).contiguous(), a.rms_norm_eps),
        out=linear(q, {"self_attn.o": h}, a.attention_bias)[0],
        post_norm=norm("post_attention_layernorm"),
        gate_up=linear(h, {"mlp.gate": i, "mlp.up": i})[0],
        down=linear(i, {"mlp.down": h})[0],
        attention_conv=_load_conv(source, a, f"{prefix}attention_conv.", dtype) if a.conv_taps else None,
        mlp_conv=_load_conv(source, a, f"{prefix}mlp_conv.", dtype) if a.conv_taps else None,
    )


def _load_conv(source: Source, a: DraftArch, prefix: str, dtype: torch.dtype) -> ConvWeights:
    t, h = a.conv_taps, a.hidden_size
    coefficients = 2 * t * (h // a.conv_group)
    return ConvWeights(
        base=source.take(f"{prefix}base_kernel", (2, t, h), dtype),
        projection=Linear(source.take(f"{prefix}kernel_projection.weight", (coefficients, h), dtype)),
        group=a.conv_group,
    )


def _finite(tensor: Tensor, path: Path, name: str) -> Tensor:
    """The tensor. Raises CheckpointError if it is damaged: one such number makes every draft nonsense."""
    if not torch.isfinite(tensor if tensor.dtype.itemsize > 1 else tensor.float()).all():
        raise CheckpointError(f"{path}: tensor {name} has numbers that are not finite as {tensor.dtype}")
    return tensor


def _read_mask(path: Path) -> Tensor:
    """The tensor in a file of torch.save, alone or as the only one of an object. Runs no code of the file."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file makes of torch's reader is of any type
        raise CheckpointError(f"{path}: damaged, or more than tensors ({type(error).__name__})") from None
    found = [v for v in saved.values() if isinstance(v, Tensor)] if isinstance(saved, dict) else [saved]
    one = found[0] if len(found) == 1 else None
    if not isinstance(one, Tensor) or not one.is_floating_point():
        raise CheckpointError(f"{path}: expected one floating point tensor, alone or in an object")
    if one.layout != torch.strided or one.device.type != "cpu":
        raise CheckpointError(f"{path}: the tensor is {one.layout} on {one.device}, expected plain numbers")
    return one.detach()
