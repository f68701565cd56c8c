"""Tiny random checkpoints written by transformers, and what transformers itself makes of them: the reference."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tests.support import tiny_model

SIZES: dict[str, Any] = {
    "vocab_size": tiny_model.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": tiny_model.BEGIN,
    "eos_token_id": tiny_model.END,
}
NEAR_TIE = 1e-4


class TinyLlama:
    """A folder, and the transformers model that wrote it in float32: a Llama, unless `model_type` says otherwise."""

    def __init__(self, folder: Path, seed: int = 0, shard: str = "1GB", **config: Any) -> None:
        """Writes the folder, in files of at most `shard`; `config` overrides SIZES.

        Weights are wide: logits differ, attention is sharp.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tiny_model.write(folder)
        transformers_logging.disable_progress_bar()
        generator = torch.Generator().manual_seed(seed)
        settings = AutoConfig.for_model(**{"model_type": "llama", **SIZES, **config})
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
                elif parameter.ndim == 1:
                    parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
                else:
                    spread = 0.3 if "lm_head" in name else 0.1
                    parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder, max_shard_size=shard)
        self.folder, self.model = folder, model
        self._wide: Any = None

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits [n, V] of every position, in float32."""
        return self.model(torch.tensor([tokens])).logits[0]

    def generate(self, prompt: list[int], count: int, stop_ids: Iterable[int] = ()) -> list[int]:
        """Greedy continuation by `generate()`, at most `count` ids, ending with the first of `stop_ids`."""
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def gap(self, tokens: list[int], one: int, other: int) -> float:
        """How far apart in float64 the logits of two candidates for the token after `tokens` are."""
        if self._wide is None:
            self._wide = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float64).eval()
        last = self._wide(torch.tensor([tokens])).logits[0, -1]
        return abs(float(last[one] - last[other]))

    def assert_same(self, prompt: list[int], got: list[int], wanted: list[int]) -> None:
        """The ids are equal up to the first near tie of the float64 logits, where roundings may decide."""
        if got == wanted:
            return
        at = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), None)
        assert at is not None, f"{len(got)} ids instead of {len(wanted)}"
        gap = self.gap(prompt + wanted[:at], got[at], wanted[at])
        assert gap < NEAR_TIE, f"id {at} is {got[at]} instead of {wanted[at]}, {gap:.5f} apart: {got} {wanted}"
