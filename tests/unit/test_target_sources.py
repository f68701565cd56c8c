"""A target can be built of any source of tensors, and its plans can be moved to any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.kernels.attention_plan import Layout
from services.kernels.device import moved
from services.model.arch import Arch, read_arch
from services.model.rope_parameters import RopeParameters
from services.model.weights import Checkpoint
from services.verifier import batch
from services.verifier.batch import Work
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import ForwardBatch, Target
from tests.support.mock_device import MockCuda
from tests.support.prefill import prefill
from tests.support.tiny_llama import TinyLlama


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen3", "tie_word_embeddings": True}])
def test_built_of_a_source_it_computes_what_the_folder_computes(tmp_path: Path, config: dict) -> None:
    llama = TinyLlama(tmp_path, **config)
    with Checkpoint(tmp_path) as checkpoint:
        built = Target.built(read_arch(tmp_path), checkpoint, torch.float32)
    tokens = list(range(5, 45))
    torch.testing.assert_close(prefill(built, tokens), llama.logits(tokens), rtol=1e-4, atol=1e-4)
    assert built.fingerprint == "" and built.device.type == "cpu"


class Normal:
    """A source of the same numbers on any device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)


def test_a_step_runs_where_the_weights_are() -> None:
    """And a batch that was left behind on the host is noticed."""
    arch = Arch("qwen3", 64, 96, 2, 4, 2, 16, 330, 64, RopeParameters(1e4), 1e-6, False, "bfloat16", qk_norm=True)
    forward, _ = batch.plan(
        [Work([1, 2, 3], 20, 3, [0, 1]), Work([4], 3, 1, [2])], Layout(8, 16, arch.num_kv_heads, torch.float32)
    )

    def run(device: torch.device) -> torch.Tensor:
        target = Target.built(arch, Normal(device), torch.float32)
        target.prepare(64)
        assert target.device == device
        return target.forward(moved(forward, device), allocate_caches(arch, 8, 16, torch.float32, device))

    wanted = run(torch.device("cpu"))
    with MockCuda():
        got = run(torch.device("cuda"))
        assert got.device.type == "cuda"
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="on the device and on the host"):
            target = Target.built(arch, Normal(torch.device("cuda")), torch.float32)
            target.prepare(64)
            target.forward(forward, allocate_caches(arch, 8, 16, torch.float32, target.device))


def test_attention_in_c_is_for_targets_on_the_cpu() -> None:
    arch = Arch("llama", 64, 96, 1, 2, 2, 32, 330, 64, RopeParameters(1e4), 1e-6, False, "bfloat16")
    with MockCuda():
        target = Target.built(arch, Normal(torch.device("cuda")), torch.bfloat16)
        kernel, layout = batch.attention_for(target, 8, 16)
    assert kernel is None and not layout.native


def test_moved_reaches_every_tensor() -> None:
    forward, _ = batch.plan([Work([1, 2, 3], 20, 3, [0, 1]), Work([4], 3, 1, [2])], Layout(8, 16, 2, torch.float32))
    assert moved(forward, torch.device("cpu")) is forward
    there = moved(forward, torch.device("meta"))
    assert isinstance(there, ForwardBatch) and there.blocks is None
    assert there.tokens.is_meta and there.slots.is_meta and there.sample_rows.is_meta
    assert all(group.pages.is_meta and group.mask.is_meta for group in there.groups)
    assert [group.rows for group in there.groups] == [group.rows for group in forward.groups]
