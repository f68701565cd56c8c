"""Greedy ids of every family and rope variant equal transformers' generate(), with and without drafts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.verifier.target import Target
from tests.support import scripted_drafter as drafters
from tests.support.engine_harness import Harness, request
from tests.support.scripted_drafter import ScriptedDrafter
from tests.support.tiny_families import FAMILIES
from tests.support.tiny_llama import TinyLlama

VOCAB, COUNT = 330, 16
# Some end, some begin beyond the positions that the scaled variants were trained for.
LENGTHS = [1, 9, 40, 60, 90, 200]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    model = TinyLlama(tmp_path, seed=13, **FAMILIES[family])
    prompts = {str(n): [rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS}
    truth = {name: prompt + model.generate(prompt, COUNT) for name, prompt in prompts.items()}
    target = Target(tmp_path, "float32")
    for k in (0, 7):
        drafter = ScriptedDrafter(drafters.partly(truth, VOCAB, k, 0.9)) if k else None
        harness = Harness(target, k=k, drafter=drafter)
        answers = harness.run([request(name, prompt, COUNT) for name, prompt in prompts.items()])
        for name, prompt in prompts.items():
            model.assert_same(prompt, answers[name].tokens, truth[name][len(prompt) :])
        stats = harness.engine.load().stats
        assert (0 < stats.accepted < stats.verified) if k else stats.verified == 0
