"""Plain decoding with every sampling option, one token after the other, by definition: a model's logits and numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support import noise

NEAR = 1e-4  # leads and distances smaller than this are left to rounding
Logits = Callable[[list[int]], np.ndarray]
"""Tokens -> logits [V] of the token after them."""


@dataclass(frozen=True)
class Options:
    """What one request asks; the names are those of `engine_harness.request`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plain:
    """One request, decoded plainly."""

    prompt: list[int]
    tokens: list[int]
    table: list[np.ndarray]
    """Log-softmax of the model's own logits for each token, float64 [V]."""
    clear: bool
    """Whether no choice was so close that roundings may decide it."""


def decode(logits: Logits, prompt: list[int], count: int, options: dict[str, Any]) -> Plain:
    """At most `count` tokens, ending with the first stop id."""
    o, tokens, table, clear = Options(**options), [], [], True
    while len(tokens) < count and not (tokens and tokens[-1] in o.stop):
        raw = logits(prompt + tokens).astype(np.float64)
        table.append(raw - raw.max() - np.log(np.exp(raw - raw.max()).sum()))
        token, decided = choose(edited(raw, prompt, tokens, o), o, len(prompt) + len(tokens))
        clear = clear and decided
        tokens.append(token)
    return Plain(prompt, tokens, table, clear)


def edited(raw: np.ndarray, prompt: list[int], answer: list[int], o: Options) -> np.ndarray:
    """Logits after masks, bias and penalties, in the order of the contract."""
    text, out = prompt + answer, raw.copy()
    if o.allowed_token_ids:
        out[[i for i in range(len(out)) if i not in o.allowed_token_ids]] = -np.inf
    if len(answer) < o.min_tokens:
        out[list(o.stop)] = -np.inf
    without = out.copy()
    for *before, last in o.bad_words:
        if len(before) <= len(text) and text[len(text) - len(before) :] == before:
            without[last] = -np.inf
    if np.isfinite(without).any():
        out = without
    for i, bias in o.logit_bias.items():
        out[i] += bias
    for i in set(text):
        out[i] = out[i] / o.repetition_penalty if out[i] > 0 else out[i] * o.repetition_penalty
    for i in set(answer):
        out[i] -= o.frequency_penalty * answer.count(i)
        out[i] -= o.presence_penalty
    return out


def choose(logits: np.ndarray, o: Options, position: int) -> tuple[int, bool]:
    """The token, and whether it is clear."""
    logits, clear = likely_enough(logits, o)
    token, lead = noise.choose(logits, o.temperature, o.top_k, o.top_p, o.seed, position)
    return token, lead > NEAR and clear


def likely_enough(logits: np.ndarray, o: Options) -> tuple[np.ndarray, bool]:
    """Logits after min-p, and whether that, and top-k and top-p after it, are clear."""
    if o.temperature == 0:
        return logits, True
    near = False
    if o.min_p > 0:
        likely = np.exp((logits - logits.max()) / o.temperature)
        near = any(_near(likely, o.min_p))
        logits = np.where(likely < o.min_p, -np.inf, logits)
    return logits, not near and not _on_an_edge(logits, o)


def _on_an_edge(logits: np.ndarray, o: Options) -> bool:
    """Whether top-k or top-p might keep one more or one less."""
    ordered = np.sort(logits[np.isfinite(logits)])[::-1] / o.temperature
    if 0 < o.top_k < len(ordered) and ordered[o.top_k - 1] - ordered[o.top_k] < NEAR:
        return True
    _, law = noise.survivors(logits, o.temperature, o.top_k, 1.0)
    return o.top_p < 1 and any(_near(law.cumsum(), o.top_p))


def _near(values: np.ndarray, limit: float) -> Iterator[bool]:
    return (abs(value - limit) < NEAR for value in values)
