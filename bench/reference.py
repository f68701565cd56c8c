"""`transformers` generate() on the served weights: what answers must equal, and what speed is held against."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True)
class Setting:
    """How generate() runs."""

    dtype: str = "float32"
    attention: str = "sdpa"
    threads: int = 0
    """0 leaves torch's choice."""


@dataclass(frozen=True)
class Generated:
    """New ids per prompt, and when each step's tokens were there (seconds since the call), prefill's first."""

    ids: list[list[int]]
    stamps: list[float]

    @property
    def decode_rate(self) -> float:
        """Tokens per second over all prompts, prefill and its first token apart."""
        return (len(self.stamps) - 1) * len(self.ids) / (self.stamps[-1] - self.stamps[0])

    @property
    def whole_rate(self) -> float:
        """Tokens per second over all prompts from call to last token, prefill included."""
        return len(self.stamps) * len(self.ids) / self.stamps[-1]


class Reference:
    """The reference model in this process; weights are loaded once a dtype."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Any] = {}
        self._tokenizer: Any = None

    def prompt_ids(self, prompt: str) -> list[int]:
        """The prompt as a user's message under the chat template."""
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
        conversation = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int, setting: Setting, stop: bool = True) -> Generated:
        """Greedy answers of at most `new_tokens`, all prompts as one batch, padded on the left.

        With `stop` an answer ends with the model's end-of-sequence id, which it holds; without, all have full length.
        """
        model = self._model(setting)
        longest = max(len(ids) for ids in prompts)
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        clock = _Clock()
        ends = set(_ids(model.generation_config.eos_token_id)) if stop else set()
        out = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
            streamer=clock,
        )
        return Generated([_until(row[longest:].tolist(), ends) for row in out], clock.stamps)

    @torch.inference_mode()
    def exact_logits(self, ids: list[int]) -> Tensor:
        """Logits [V] after `ids`, in float64."""
        model = self._model(Setting("float64"))
        return model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]

    def _model(self, setting: Setting) -> Any:
        if setting.threads:
            torch.set_num_threads(setting.threads)
        if setting.dtype not in self._models:
            dtype = getattr(torch, setting.dtype)
            model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype)
            model.eval()
            # Neither sampling defaults of the model nor a stop id that we did not ask for.
            model.generation_config.temperature = model.generation_config.top_p = model.generation_config.top_k = None
            self._models[setting.dtype] = model
        model = self._models[setting.dtype]
        if model.config._attn_implementation != setting.attention:
            model.set_attn_implementation(setting.attention)
        return model


class _Clock(BaseStreamer):
    """Notes when each step's tokens come; the first call brings the prompt."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._seen_prompt = False
        self.stamps: list[float] = []

    def put(self, value: Tensor) -> None:
        if self._seen_prompt:
            self.stamps.append(time.perf_counter() - self._begun)
        self._seen_prompt = True

    def end(self) -> None:
        pass


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else value


def _until(ids: list[int], ends: set[int]) -> list[int]:
    """Up to and with the first of `ends`."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids
