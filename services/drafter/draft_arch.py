"""The shape of a drafter, read from a checkpoint's config.json in any of its spellings and checked; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.drafter.draft_config import DFLASH2, DraftConfig
from services.model.rope_parameters import RopeParameters, context_length

UNARY_TOP_K = 16
"""Candidates whose probabilities a drafter without a selector reports."""


@dataclass(frozen=True)
class DraftArch:
    """Sizes and constants of a drafter (draft-model contracts, sections 1 and 3)."""

    kind: str
    """"dflash2", or "dflash": neither convolution nor selector."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeParameters
    attention_bias: bool
    block_size: int
    """Query slots of one block, the anchor's included."""
    taps: tuple[int, ...]
    """Layers of the target whose outputs are read, from 0, increasing."""
    num_target_layers: int
    """0: the file does not say."""
    target_hidden_size: int
    mask_token_id: int | None
    """None: the checkpoint brings an embedding of its own for the slots to be filled."""
    windows: tuple[int, ...]
    """Per layer; 0 is full attention, else the keys a query sees to its left, itself counted."""
    causal: tuple[bool, ...]
    """Per layer: whether a slot sees no later slot."""
    first_slot: int
    """The slot that predicts the token after the anchor: 1, or 0 where the anchor's own slot does."""
    conv_taps: int
    """0: no convolutions."""
    conv_group: int
    selector_rank: int
    """0: no selector."""
    selector_top_k: int
    output_multiplier: float = 1.0
    softcap: float = 0.0
    """0 is off."""
    embedding_scale: float = 1.0
    own_embedding: bool = False
    """The checkpoint says that it has an embedding table."""

    @property
    def max_draft_tokens(self) -> int:
        """Tokens a whole block drafts."""
        return self.block_size - self.first_slot

    @property
    def window(self) -> int:
        """Rows of context that can ever be read, the anchor counted; 0: all."""
        return max(self.windows) if all(self.windows) else 0


def read_draft_arch(folder: Path) -> DraftArch:
    """Reads and checks `folder`/config.json. Raises CheckpointError naming file, key, value and what is supported."""
    config = DraftConfig.read(folder / "config.json")
    hidden, vocab, layers = (config.size(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
    heads, kv_heads, head_dim = _heads(config)
    kinds, rope = config.layer_kinds(layers), config.rope(config.layer_kinds(layers))
    target_layers = config.size("num_target_layers") if config.get("num_target_layers") is not None else 0
    conv_taps, conv_group, rank, top_k = _extras(config, hidden, vocab)
    block, first = config.size("block_size", "dspark_block_size"), config.first_slot()
    if block - first < 1:
        raise config.error("block_size", block, "at least 2")
    softcap = config.get("final_logit_softcapping", default=0)
    off = isinstance(softcap, int | float) and softcap <= 0
    return DraftArch(
        kind="dflash2" if config.architecture in DFLASH2 else "dflash",
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position=context_length(rope, config.size("max_position_embeddings")),
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=rope,
        attention_bias=bool(config.flag("attention_bias")),
        block_size=block,
        taps=config.taps(target_layers),
        num_target_layers=target_layers,
        target_hidden_size=config.size("target_hidden_size", default=hidden),
        mask_token_id=config.mask_token(vocab),
        windows=config.windows(kinds),
        causal=config.causal(kinds),
        first_slot=first,
        conv_taps=conv_taps,
        conv_group=conv_group,
        selector_rank=rank,
        selector_top_k=top_k,
        output_multiplier=config.number("output_multiplier", "logit_scale", default=1.0),
        softcap=0.0 if off else config.number("final_logit_softcapping", default=0),
        embedding_scale=config.number("input_embedding_scale", default=1.0),
        own_embedding=bool(config.flag("has_embed_tokens")),
    )


def _heads(config: DraftConfig) -> tuple[int, int, int]:
    """Query heads, KV heads and their size."""
    heads, kv_heads, head_dim = (
        config.size("num_attention_heads"),
        config.size("num_key_value_heads"),
        config.size("head_dim"),
    )
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    if head_dim % 2:
        raise config.error("head_dim", head_dim, "an even number")
    return heads, kv_heads, head_dim


def _extras(config: DraftConfig, hidden: int, vocab: int) -> tuple[int, int, int, int]:
    """What only DFlash 2 has: taps and group of its convolutions, rank and candidates of its selector."""
    taps, group = config.pair("conv_kernel_size", "conv_group_size")
    rank, top_k = config.pair("selector_rank", "selector_top_k")
    if taps or rank:
        if config.architecture not in DFLASH2:
            key = "conv_kernel_size" if taps else "selector_rank"
            raise config.error(key, config.get(key), f"none for {config.architecture}")
    elif config.architecture in DFLASH2:
        raise config.error("conv_kernel_size", None, f"a positive integer for {config.architecture}")
    if group and hidden % group:
        raise config.error("conv_group_size", group, f"a divisor of hidden_size, {hidden}")
    if top_k > vocab:
        raise config.error("selector_top_k", top_k, f"at most vocab_size, {vocab}")
    return taps, group, rank, top_k or min(UNARY_TOP_K, vocab)
