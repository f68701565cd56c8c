"""A tiny Llama model as a GGUF file, with random weights and a byte-level tokenizer of a few merges."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "Ġ w", "Ċ Ġ"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


@dataclass
class TinyModel:
    """What goes into the file; change it before `write`. Projections are in Hugging Face row order, float32."""

    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    inner: int = 24
    layers: int = 2
    architecture: str = "llama"
    split: str = "smollm"
    rope_scaling: str = ""
    tied: bool = True
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """By GGUF name, q and k not yet permuted."""

    def __post_init__(self) -> None:
        noise = np.random.default_rng(0)
        kv = self.kv_heads * (self.hidden // self.heads)
        h, inner, vocab = self.hidden, self.inner, len(TOKENS)
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, h), "output_norm.weight": (h,)}
        if not self.tied:
            shapes["output.weight"] = (vocab, h)
        for layer in range(self.layers):
            parts: dict[str, tuple[int, ...]] = {
                "attn_norm": (h,),
                "attn_q": (h, h),
                "attn_k": (kv, h),
                "attn_v": (kv, h),
                "attn_output": (h, h),
                "ffn_norm": (h,),
                "ffn_gate": (inner, h),
                "ffn_up": (inner, h),
                "ffn_down": (h, inner),
            }
            shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
        for name, shape in shapes.items():
            self.tensors[name] = noise.standard_normal(shape, dtype=np.float32)

    def write(self, path: Path) -> Path:
        """Writes the file as llama.cpp's converter would."""
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_context_length(64)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.inner)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(100000.0)
        writer.add_rope_dimension_count(self.hidden // self.heads)
        if self.rope_scaling:
            writer.add_rope_scaling_type(gguf.RopeScalingType(self.rope_scaling))
        writer.add_vocab_size(len(TOKENS))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        for name, values in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(self._stored(name, values)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _stored(self, name: str, values: np.ndarray) -> np.ndarray:
        """q and k rows as the file keeps them: row i of a head's first half next to row i of its second half."""
        heads = self.heads if ".attn_q." in name else self.kv_heads if ".attn_k." in name else 0
        if not heads or values.ndim != 2:
            return values
        order: list[Any] = []
        size = len(values) // heads
        for head in range(heads):
            for index in range(size // 2):
                order += [head * size + index, head * size + size // 2 + index]
        return values[order]
