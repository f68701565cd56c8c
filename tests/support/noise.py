"""The addressable noise and rule `match` once more, from their definitions, in numpy and plain integers."""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output of splitmix64 after its state was `state` (Steele, Lea, Flood 2014; Vigna's splitmix64.c)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def lowbias32(x: np.ndarray) -> np.ndarray:
    """Wellons' hash-prospector permutation of uint32."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniform(seed: int, position: int, tokens: np.ndarray, *more: int) -> np.ndarray:
    """float64 in (0, 1): odd multiples of 2**-24, one per token; `position` and `more` are the rest of the address."""
    word = splitmix64(seed % 2**64)
    for number in (position, *(more or (0,))):
        word = splitmix64(word ^ number)
    low, high = np.uint32(word % 2**32), np.uint32(word >> 32)
    bits = lowbias32(lowbias32(tokens.astype(np.uint32) ^ low) + high)
    return ((bits >> np.uint32(9)).astype(np.float64) + 0.5) / 2**23


def gumbel(seed: int, position: int, tokens: np.ndarray, *more: int) -> np.ndarray:
    """float64 standard Gumbel noise, one per token."""
    return -np.log(-np.log(uniform(seed, position, tokens, *more)))


def survivors(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[list[int], np.ndarray]:
    """Ids that top-k, then top-p leave, likeliest first and ties smaller id first, and their law; by definition."""
    scaled = logits.astype(np.float64) / temperature
    ids = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        ids = ids[:top_k]
    law = np.exp(scaled[ids] - scaled[ids].max())
    law /= law.sum()
    if top_p < 1:
        # The smallest prefix whose mass reaches top_p.
        count = next((n for n in range(1, len(ids) + 1) if law[:n].sum() >= top_p), len(ids))
        ids, law = ids[:count], law[:count] / law[:count].sum()
    return ids, law


def choose(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> tuple[int, float]:
    """The token of rule `match` at `position`, and by how much it won."""
    if temperature == 0:
        ids, score = list(range(len(logits))), logits.astype(np.float64)
    else:
        ids, _ = survivors(logits, temperature, top_k, top_p)
        score = logits[ids].astype(np.float64) / temperature + gumbel(seed, position, np.array(ids))
    best = int(score.argmax())
    others = np.delete(score, best)
    return ids[best], float(score[best] - others.max()) if len(others) else float("inf")
