"""bench.gpu runs to its end without a GPU, and what it times is the real cycle, on any device."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_parts
from bench.cycle import Cycle, Models
from bench.device_clock import Clock
from bench.random_models import SHAPES, tiny
from services.verifier.draft import Draft
from tests.shape.source_tree import ROOT
from tests.support.mock_device import MockCuda

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def continue_texts(device: torch.device, k: int, steps: int, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    torch.manual_seed(0)
    models = Models(replace(tiny(), dtype=dtype), 3, 12, device)
    assert models.caches[0].device.type == models.draft_kv.caches[0].device.type == device.type
    cycle = Cycle(models, 3, k)
    for _ in range(steps):
        cycle.step()
    return [text.tokens for text in cycle.texts]


def test_the_cycle_is_lossless() -> None:
    """Whatever part of a draft is right, texts go on as they do without drafts."""
    torch.manual_seed(0)
    models = Models(tiny(), 3, 12, CPU)
    plain = Cycle(models, 3, 0)
    for _ in range(60):
        assert plain.step() == 3
    plain.close()
    drafting = Cycle(models, 3, 7)
    for step in range(6):
        rights, drafts = [(5 * i + 3 * step) % 8 for i in range(3)], []
        for draft, text, right, truth in zip(drafting.draft(), drafting.texts, rights, plain.texts, strict=True):
            assert len(draft) == 7
            coming = truth.tokens[len(text.tokens) :][:7]
            drafts.append(Draft([*coming[:right], *((token + 1) % 640 for token in coming[right:])]))
        drafting.verify(drafts)
        assert drafting.accept(drafts) == sum(rights) + 3
    for text, truth in zip(drafting.texts, plain.texts, strict=True):
        assert len(text.tokens) > 20 and text.tokens == truth.tokens[: len(text.tokens)]


def test_the_cycle_runs_on_another_device() -> None:
    """Nothing of it mixes tensors of the device with tensors of the host."""
    with MockCuda():
        there = continue_texts(CUDA, 7, 5)
        continue_texts(CUDA, 7, 2, torch.bfloat16)
    assert there == continue_texts(CPU, 7, 5)


def test_what_is_captured_is_made_on_the_device_alone() -> None:
    """What a graph would hold runs again and again, and gives the same; a device without graphs just runs it."""

    class Replaying(Clock):
        def __init__(self) -> None:
            super().__init__(CPU)
            self.captured: list[Any] = []

        def graph(self, run: Any) -> Any:
            first, again = run(), run()
            for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (first, again)), strict=True):
                assert torch.equal(one.cpu(), other.cpu())
            self.captured.append(run)
            return run

    clock = Replaying()
    with MockCuda():
        models = Models(tiny(), 3, 4, CUDA)
        for k, count in ((0, 1), (7, 2)):
            clock.captured.clear()
            found = gpu_parts.passes(clock, models, 3, k, 2)
            assert len(clock.captured) == count
            assert ("block_graph_ms" in found) == (k > 0) and "verify_graph_ms" in found


def test_it_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SEQUENCES", (1, 2))
    out = tmp_path / "deep" / "gpu.json"
    assert gpu.main(["--device", "cpu", "--out", str(out), "--rounds", "1"]) == 0
    data = json.loads(out.read_text())
    assert data["errors"] == data["skipped"] == []
    assert data["ceilings"]["copy_gb_per_s"] > 0
    shape = data["shapes"]["tiny"]
    assert [(step["sequences"], step["k"]) for step in shape["steps"]] == [(r, k) for r in (1, 2) for k in (0, 3, 7)]
    for step in shape["steps"]:
        assert all(step[f"{name}_ms"]["median"] >= 0 for name in ("draft", "verify", "accept", "whole"))
        assert 1 <= step["committed_per_step"] <= 1 + step["k"]
        assert step["rows"] == step["sequences"] * (1 + step["k"])
    assert all("paged_ms" in found and "causal_ms" in found for found in shape["attention"])


def test_what_fails_does_not_take_the_rest_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> dict[str, Any]:
        if arguments[3] == 3:
            raise RuntimeError("out of memory")
        return {"sequences": arguments[2], "k": arguments[3]}

    monkeypatch.setattr(gpu, "SEQUENCES", (1,))
    monkeypatch.setattr(gpu_parts, "step", broken)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.json"), "--rounds", "1"]) == 1
    data = json.loads((tmp_path / "gpu.json").read_text())
    (error,) = data["errors"]
    assert error["part"] == "tiny: steps, 1 sequences, K 3" and error["error"] == "RuntimeError: out of memory"
    assert error["where"].startswith("test_gpu_bench.py:")
    assert [step["k"] for step in data["shapes"]["tiny"]["steps"]] == [0, 7]


def test_without_time_parts_are_skipped(tmp_path: Path) -> None:
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path / "gpu.json"), "--seconds", "-1"]) == 0
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert data["skipped"] == ["ceilings", "tiny: models"] and data["ceilings"] is None


def test_attention_that_is_timed_is_the_same_attention() -> None:
    """The ways that are compared compute one thing."""
    models = Models(tiny(), 2, 0, CPU)
    found = {}
    real = Clock(CPU).often

    class Keeping(Clock):
        def often(self, run: Any, rounds: int) -> list[float]:
            found[len(found)] = run()
            return real(run, rounds)

    gpu_parts.attention(Keeping(CPU), models, 2, 7, 1)
    paged, _, masked, causal = found.values()
    for own in (masked, causal):
        torch.testing.assert_close(own.transpose(1, 2).reshape(paged.shape), paged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-8b", 8.19), ("dense-27b", 27.04)])
def test_targets_have_as_many_parameters_as_they_say(name: str, billions: float) -> None:
    a = SHAPES[name]().target
    attention = a.hidden_size * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    layer = attention + 3 * a.hidden_size * a.intermediate_size
    count = a.num_layers * layer + 2 * a.vocab_size * a.hidden_size
    assert count / 1e9 == pytest.approx(billions, abs=0.01)


def test_it_needs_neither_grpc_nor_pydantic() -> None:
    absent = ("grpc", "google", "pydantic", "ray", "transformers", "tokenizers", "psutil", "prometheus_client")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r})); from bench import gpu; gpu._make_importable();"
        "import bench.gpu_parts, kadence.errors; kadence.errors.CheckpointError"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_no_gpu_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cuda", "--out", str(tmp_path / "gpu.json")])
    assert "finds no GPU" in capsys.readouterr().err
