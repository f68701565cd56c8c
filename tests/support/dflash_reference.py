"""The drafter of the PyPI package dflash, driven round by round: what ours must be equal to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import dflash.model
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from torch import Tensor
from transformers import Qwen3Config
from transformers.utils import logging as transformers_logging

TOP_K = 16
"""Candidates per position; what the package keeps of a dflash drafter's logits is a parameter there."""
_SPREADS = {"codebook": 0.8, "v_proj": 0.3, "o_proj": 0.3}


@dataclass(frozen=True)
class Proposed:
    """n drafted ids; with a temperature also q [n, V], the law each was drawn from."""

    token_ids: list[int]
    q: Tensor | None


def write(folder: Path, config: dict[str, Any], seed: int = 0) -> None:
    """Writes a checkpoint by the package's own modules, float32, of a config.json in the published format.

    Weights are wide, so that drafts vary with context and slot, but not so wide that they multiply what is rounded.
    """
    transformers_logging.disable_progress_bar()
    kind = DFlash2DraftModel if "selector_rank" in config["dflash_config"] else DFlashDraftModel
    model = kind(Qwen3Config(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_((1.5 if "self_attn" in name else 1) * (1 + 0.1 * noise))
            elif name.endswith("base_kernel"):
                parameter.copy_(0.3 * noise)
                parameter[:, 0] += 1
            else:
                parameter.copy_(next((s for part, s in _SPREADS.items() if part in name), 0.1) * noise)
    model.save_pretrained(folder)


class Reference:
    """One session of a checkpoint's drafter in the package, in float32, for a transformers target.

    Each round gives it the text so far, of any length from the last one on; what the text does not hold was rejected.
    """

    def __init__(self, folder: Path, target: Any) -> None:
        config = Qwen3Config.from_pretrained(folder)
        kind = DFlash2DraftModel if "selector_rank" in config.dflash_config else DFlashDraftModel
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        self._target = target
        self.begin()

    def begin(self) -> None:
        """Forgets the text."""
        self._cache = dflash.model._make_cache(self.model.config)
        self._known: tuple[list[int], Tensor] | None = None

    @torch.inference_mode()
    def taps(self, tokens: list[int]) -> Tensor:
        """The target's tapped hidden states of every token, side by side [1, n, M * h_target]."""
        if self._known is None or self._known[0] != tokens:
            states = self._target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            self._known = tokens, dflash.model.extract_context_feature(states, self.model.target_layer_ids)
        return self._known[1]

    @torch.inference_mode()
    def hidden(self, tokens: list[int], slots: int) -> Tensor:
        """Hidden rows [1, slots, h] of a block behind `tokens`, whose last is the anchor."""
        start = len(tokens) - 1
        block = torch.tensor([[tokens[-1]] + [self.model.mask_token_id] * (slots - 1)])
        scale = float(dflash.model._draft_value(self.model.config, "input_embedding_scale", 1.0))
        held = self._cache.get_seq_length()
        hidden = self.model(
            target_hidden=self.taps(tokens[:-1])[:, held:],
            noise_embedding=dflash.model._raw_input_embeddings(self._target, block, scale),
            position_ids=torch.arange(held, start + slots)[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        dflash.model._crop_to(self._cache, start)
        return hidden

    @torch.inference_mode()
    def propose(
        self, tokens: list[int], slots: int, temperature: float = 0.0, path: list[int] | None = None
    ) -> Proposed:
        """Drafts slots - 1 tokens; with a temperature along `path`, which stands for what was drawn."""
        hidden = self.hidden(tokens, slots)[:, 1:]
        logits = self.model.compute_logits(hidden, self._target.lm_head)
        if not isinstance(self.model, DFlash2DraftModel):
            if not temperature:
                return Proposed(logits[0].argmax(-1).tolist(), None)
            assert path is not None
            return Proposed(path, dflash.model._sampling_probs(logits, temperature, top_k=TOP_K)[0])
        ranks = iter(self._ranks(logits[0], path or []) if temperature else [])
        anchor = torch.tensor(tokens[-1:])
        with mock.patch.object(dflash.model, "_sample_probs", lambda q: torch.tensor([next(ranks)])):
            ids, candidates, q = self.model.propose(hidden, anchor, self._target.lm_head, temperature)
        if q is not None:
            q = torch.zeros_like(logits).scatter(-1, candidates, q)[0]
        return Proposed(ids[0].tolist(), q)

    def _ranks(self, logits: Tensor, path: list[int]) -> list[int]:
        """Where each id of the path stands among its position's candidates, in the package's order."""
        candidates = torch.topk(logits, self.model.candidate_selector.top_k, sorted=False).indices.tolist()
        for row, token in zip(candidates, path, strict=True):
            assert token in row, f"{token} was drawn, which is no candidate"
        return [row.index(token) for row, token in zip(candidates, path, strict=True)]
