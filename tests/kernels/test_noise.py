"""The noise is a pure function of (seed, position, token): bit for bit that of numpy, and Gumbel by law."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from services.kernels.noise_ref import gumbel, key_tensor, noise_key, uniform
from tests.support import noise
from tests.support.stats import chi_square_p

SEEDS = [0, 1, 2**31 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF]
POSITIONS = [0, 1, 17, 8191, 2**31 - 1]


def ours(seed: int, position: int, tokens: np.ndarray, stream: int = 0) -> np.ndarray:
    keys = key_tensor([noise_key(seed, position, stream)])
    return gumbel(keys, torch.from_numpy(tokens.astype(np.int32))[None])[0].numpy()


def test_reference_is_the_published_splitmix64() -> None:
    # First outputs of splitmix64 seeded with 0 and 1234567 (Vigna's code; Rosetta Code lists the latter).
    assert noise.splitmix64(0) == 0xE220A8397B1DCDAF
    assert noise.splitmix64(1234567) == 6457827717110365317


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_transcription(seed: int, position: int) -> None:
    tokens = np.array([0, 1, 2, 3, 255, 256, 49151, 128255, 2**31 - 1])
    for stream in (0, 1):
        got, wanted = ours(seed, position, tokens, stream), noise.gumbel(seed, position, tokens, stream)
        # The uniforms are exact in float32; two logarithms round.
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=5e-7)


def test_addresses_of_any_length() -> None:
    """Rule `ratio` addresses by five numbers; its uniforms are exact."""
    tokens = np.array([0, 7, 49151])
    for address in [(5, 0, 0, 1, 2), (2**64 - 1, 3, 70_000, 16, 3)]:
        keys = key_tensor([noise_key(*address)])
        got = uniform(keys, torch.from_numpy(tokens.astype(np.int32))[None])[0].double().numpy()
        seed, attempt, *more = address
        assert (got == noise.uniform(seed, attempt, tokens, *more)).all()


def test_one_bit_of_the_uniform_shows() -> None:
    """What the tolerance above cannot see in the middle: the 23 bits come back out of the noise exactly."""
    tokens = np.arange(4096)
    wanted = noise.uniform(5, 9, tokens)
    back = np.exp(-np.exp(-ours(5, 9, tokens).astype(np.float64)))
    assert np.abs(back - wanted).max() < 2.0**-22


def test_streams_are_separate() -> None:
    tokens = np.arange(1000)
    a, b = ours(3, 4, tokens, 0), ours(3, 4, tokens, 1)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1 and not np.isclose(a, b).all()


def test_rows_and_columns_do_not_matter() -> None:
    """A token's noise is the same alone, among candidates, or in a whole vocabulary, whatever else is computed."""
    keys = key_tensor([noise_key(seed, position) for seed in (1, 2**40) for position in (5, 6, 7)])
    whole = gumbel(keys, torch.arange(1003, dtype=torch.int32)[None])
    rng = random.Random(0)
    for row in range(len(keys)):
        some = sorted(rng.sample(range(1003), 16))
        picked = gumbel(keys[row : row + 1], torch.tensor([some], dtype=torch.int32))
        torch.testing.assert_close(picked[0], whole[row, some], rtol=0, atol=2e-6)


def test_inputs_are_left_alone() -> None:
    keys, tokens = key_tensor([noise_key(1, 1)]), torch.arange(8, dtype=torch.int32)[None]
    before = keys.clone(), tokens.clone()
    gumbel(keys, tokens)
    assert torch.equal(keys, before[0]) and torch.equal(tokens, before[1])


def test_is_finite_at_both_ends() -> None:
    least, most = np.float32(0.5 * 2**-23), np.float32(1 - 0.5 * 2**-23)
    ends = -np.log(-np.log(np.array([least, most], dtype=np.float64)))
    values = gumbel(key_tensor([noise_key(0, 0)]), torch.arange(2_000_000, dtype=torch.int32)[None])
    assert torch.isfinite(values).all()
    assert values.min() >= ends[0] - 1e-5 and values.max() <= ends[1] + 1e-5


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_is_gumbel_and_independent(along: str) -> None:
    """Neighbours, along each of the three inputs, are independent and equally likely in 8 x 8 classes."""
    n = 60_000
    if along == "tokens":
        values = ours(11, 3, np.arange(n))
    else:
        each = [(11, i) if along == "positions" else (i, 11) for i in range(n)]
        values = gumbel(key_tensor([noise_key(*pair) for pair in each]), torch.tensor([[5]], dtype=torch.int32))
        values = values[:, 0].numpy()
    classes = np.floor(8 * np.exp(-np.exp(-values.astype(np.float64)))).astype(int)
    flat = {(i, j): 1 / 64 for i in range(8) for j in range(8)}
    assert chi_square_p(zip(classes[::2].tolist(), classes[1::2].tolist(), strict=True), flat) > 1e-3
