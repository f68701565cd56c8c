"""The engine's bounds: what the configuration leaves open is filled in, contradictions are refused, all is printed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kadence.errors import ConfigError
from services.model.arch import Arch
from services.model.rope_parameters import RopeParameters
from services.runtime.config import ModelConfig
from services.verifier.config import VerifierConfig
from services.verifier.service import banner, resolve_limits

ROPE = RopeParameters(1e4)
ARCH = Arch("llama", 64, 96, 3, 4, 2, 16, 330, 512, ROPE, 1e-5, False, "float32")
TARGET: Any = SimpleNamespace(arch=ARCH, dtype=torch.bfloat16)


def config(**values: Any) -> VerifierConfig:
    return VerifierConfig(model=ModelConfig(path="x"), **values)


@pytest.mark.parametrize(
    ("values", "longest", "pages"),
    [
        ({"kv_tokens": 1024}, 512, 64),  # the model's
        ({"kv_tokens": 256}, 256, 16),  # what KV holds
        ({"kv_tokens": 100, "page_size": 16}, 96, 6),  # whole pages only
        ({"kv_tokens": 1024, "max_model_len": 200}, 200, 64),
        ({"kv_tokens": 512, "max_model_len": 512, "page_size": 1}, 512, 512),
    ],
)
def test_limits(values: dict[str, int], longest: int, pages: int) -> None:
    limits = resolve_limits(config(**values), TARGET)
    assert (limits.max_model_len, limits.num_pages) == (longest, pages)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_waiting) == (64, 512, 1024)
    assert (limits.prefill.rows, limits.prefix_caching) == (128, True)


def test_what_a_prompt_row_costs() -> None:
    """SmolLM2-135M: 3.54 M weights a layer, 1,152 multiplications a key; attention's count twice."""
    arch = Arch("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, ROPE, 1e-5, True, "bfloat16")
    target: Any = SimpleNamespace(arch=arch, dtype=torch.bfloat16)
    weights = 576 * 9 * 64 + 2 * 576 * 3 * 64 + 9 * 64 * 576 + 3 * 576 * 1536
    assert resolve_limits(config(), target).prefill.keys_per_row == weights / (2 * 9 * 64) / 2


def test_limits_that_only_pass_through() -> None:
    limits = resolve_limits(config(max_prefill_tokens=7, prefix_caching=False), TARGET)
    assert (limits.prefill.rows, limits.prefix_caching) == (7, False)
    assert "max_prefill_tokens 7, max_model_len 512, prefix caching off" in banner(TARGET, limits, "native")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_model_len": 513}, "[verifier] max_model_len = 513: the model's positions end at 512"),
        ({"kv_tokens": 100, "max_model_len": 97}, "[verifier] max_model_len = 97: kv_tokens holds only 96"),
        (
            {"max_num_seqs": 100, "max_num_batched_tokens": 99},
            "[verifier] max_num_batched_tokens = 99: must be at least max_num_seqs, 100",
        ),
        ({"kv_tokens": 64, "page_size": 100}, "[verifier] kv_tokens = 64: must be at least page_size, 100"),
    ],
)
def test_contradictions(values: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_limits(config(**values), TARGET)
    assert str(caught.value) == says


def test_banner() -> None:
    """Everything that bounds the engine, with the KV's capacity in tokens and memory."""
    text = banner(TARGET, resolve_limits(config(kv_tokens=8192, page_size=8), TARGET), "native")
    mib = 8192 * 2 * 3 * 2 * 16 * 2 / 2**20
    assert "\n" not in text and f"KV 8192 tokens in 1024 pages of 8 ({mib:.0f} MiB)" in text
    for part in (
        "llama 3 layers, bfloat16",
        "native attention",
        "max_num_seqs 64",
        "max_num_batched_tokens 512",
        "max_prefill_tokens 128",
        "prefix caching on",
        "max_model_len 512",
    ):
        assert part in text
