"""A real block drafter beside a real engine: no text changes, and no draft is lost on the way its rows took."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.drafter.draft_arch import read_draft_arch
from services.drafter.draft_weights import load_draft
from services.drafter.methods import Method, Setting, create
from services.model.projection import ProjectionWeights
from services.runtime.config import ModelConfig
from services.verifier.target import Target
from tests.support.engine_harness import Answer, request
from tests.support.method_drafter import MethodDrafter
from tests.support.stepping import Stepping
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama

VOCAB, COUNT, K = 330, 24, 7
KINDS: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "dflash2, sliding": {"layer_types": "sliding_attention"},
    "dflash": {"is_causal": True},
}


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


SHARED = ids(48, 0)
PROMPTS = {"a": [*SHARED, 5], "b": [*SHARED, 6, 7], "c": ids(21, 1), "d": ids(3, 2)}


class Scene:
    """A model, two drafters for it of one kind, and engines on demand."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.llama = TinyLlama(folder / "model", num_hidden_layers=TARGET_LAYERS)
        self.target = Target(self.llama.folder, "float32")
        self.drafters = [self._load(folder / f"drafter-{seed}", kind, seed) for seed in (1, 2)]

    def _load(self, folder: Path, kind: str, seed: int) -> tuple[Method, ProjectionWeights]:
        name = kind.split(",")[0]
        write_drafter(folder, name, seed=seed, **KINDS[kind])
        setting = Setting(K, 16, 4096, ModelConfig(path=str(self.llama.folder), dtype="float32"))
        weights = load_draft(folder, read_draft_arch(folder), torch.float32).projection
        return create(name, {"checkpoint": str(folder)}, setting), weights

    def engine(self, drafter: int = 0, **changes: Any) -> tuple[Stepping, MethodDrafter]:
        link = MethodDrafter(*self.drafters[drafter])
        return Stepping(self.target, k=K, drafter=link, **changes), link

    def check(self, name: str, answer: Answer) -> None:
        """Greedy text is that of plain decoding."""
        self.llama.assert_same(PROMPTS[name], answer.tokens, self.llama.generate(PROMPTS[name], COUNT))

    def fresh(self, name: str, drafter: int = 0) -> dict[int, list[int]]:
        """What is drafted for a request alone on a new cluster, by length of its text; every length is asked for."""
        run, link = self.engine(drafter)
        self.check(name, run.play(request(name, PROMPTS[name], COUNT))[name])
        return {length: draft for (_, length), draft in link.drafts.items()}


@pytest.fixture(scope="module", params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("models"), request.param)


def drafted(link: MethodDrafter, name: str) -> dict[int, list[int]]:
    return {length: draft for (other, length), draft in link.drafts.items() if other == name}


def test_together_with_others(scene: Scene) -> None:
    """Chunked prompts, few pages, pre-emption: the same drafts as alone."""
    run, link = scene.engine(num_pages=16, max_num_batched_tokens=40)
    for name, answer in run.play(*(request(name, PROMPTS[name], COUNT) for name in PROMPTS)).items():
        scene.check(name, answer)
        assert drafted(link, name) == scene.fresh(name)
    assert run.engine.load().stats.preemptions


def test_every_length(scene: Scene) -> None:
    run, _ = scene.engine()
    answers = run.play(*(request(str(k), PROMPTS["c"], COUNT, max_draft_tokens=k) for k in range(K + 1)))
    for k in range(K + 1):
        scene.check("c", answers[str(k)])
        assert max(update.verified for update in answers[str(k)].updates) == k


def test_after_a_prefix_hit(scene: Scene) -> None:
    run, link = scene.engine()
    run.play(request("a", PROMPTS["a"], COUNT))
    scene.check("b", run.play(request("b", PROMPTS["b"], COUNT))["b"])
    assert run.cached("b") == len(SHARED) and drafted(link, "b") == scene.fresh("b")


def test_after_a_restart(scene: Scene) -> None:
    run, link = scene.engine()
    run.submit(*(request(name, PROMPTS[name], COUNT) for name in "ac"))
    run.until(lambda: len(link.drafts) > 4)
    link.lose()
    run.step()
    link.reconnect()
    run.until(lambda: not run.engine.busy)
    for name in "ac":
        scene.check(name, run.answers[name])
        after, alone = drafted(link, name), scene.fresh(name)
        common = after.keys() & alone.keys()
        assert len(common) > 3 and all(after[length] == alone[length] for length in common)


def test_after_a_change_of_drafters(scene: Scene) -> None:
    run, link = scene.engine()
    run.play(request("a", PROMPTS["a"], COUNT))
    link.lose()
    link.use(*scene.drafters[1])
    link.reconnect()
    scene.check("b", run.play(request("b", PROMPTS["b"], COUNT))["b"])
    assert run.cached("b") == 0 and drafted(link, "b") == scene.fresh("b", drafter=1)
    assert drafted(link, "b") != scene.fresh("b"), "the drafters do not differ"


def test_sampled_text_is_that_of_plain_sampling(scene: Scene) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 11}
    plain = Stepping(scene.target).play(*(request(name, PROMPTS[name], COUNT, **options) for name in PROMPTS))
    run, link = scene.engine()
    told = run.play(*(request(name, PROMPTS[name], COUNT, **options) for name in PROMPTS))
    assert {name: answer.tokens for name, answer in told.items()} == {n: a.tokens for n, a in plain.items()}
    assert link.drafts and not run.drafting.counters.stale
