"""A target can be built of any source of tensors, and its plans can be moved to any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.kernels.device import moved
from services.model.arch import Arch, read_arch
from services.model.rope_parameters import RopeParameters
from services.model.weights import Checkpoint
from services.verifier import batch
from services.verifier.batch import Layout, Work
from services.verifier.paged_kv import allocate_caches
from services.verifier.target import ForwardBatch, Target
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


def test_a_step_runs_on_another_device_without_touching_the_host() -> None:
    """The meta device computes shapes only, and refuses tensors of the host."""

    class Meta:
        def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

    arch = Arch("qwen3", 64, 96, 2, 4, 2, 16, 330, 64, RopeParameters(1e4), 1e-6, False, "bfloat16", qk_norm=True)
    target = Target.built(arch, Meta(), torch.bfloat16)
    assert target.device.type == "meta"
    target.prepare(64)
    caches = allocate_caches(arch, 8, 16, torch.bfloat16, target.device)
    works = [Work([1, 2, 3], 20, 3, [0, 1]), Work([4], 3, 1, [2])]
    forward, _ = batch.plan(works, Layout(8, 16, arch.num_kv_heads, torch.bfloat16))
    logits = target.forward(moved(forward, target.device), caches)
    assert logits.device.type == "meta" and logits.shape == (4, arch.vocab_size)


def test_moved_reaches_every_tensor() -> None:
    forward, _ = batch.plan([Work([1, 2, 3], 20, 3, [0, 1]), Work([4], 3, 1, [2])], Layout(8, 16, 2, torch.float32))
    assert moved(forward, torch.device("cpu")) is forward
    there = moved(forward, torch.device("meta"))
    assert isinstance(there, ForwardBatch) and there.blocks is None
    assert there.tokens.is_meta and there.slots.is_meta and there.sample_rows.is_meta
    assert all(group.pages.is_meta and group.mask.is_meta for group in there.groups)
    assert [group.rows for group in there.groups] == [group.rows for group in forward.groups]
