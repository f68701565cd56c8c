"""Drafts over whole answers against the drafter of the PyPI package, block by block."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kadence.errors import CheckpointError
from services.verifier.target import Target
from tests.support.dflash_reference import Reference
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama
from training.conversations import Conversation
from training.examples import Example
from training.features import Extractor
from training.offline import Drafter, walked, without_selector

VOCAB, SLOTS, K = 330, 8, 7
TAKEN = ((3, 0, 7, 1, 7, 2), (0, 5, 1), (6, 7))
"""By answer: how many drafted tokens each of its steps accepts; 7 is all."""


class Scene:
    """A target, a drafter, and answers that are made so that the drafter's steps along them are known."""

    def __init__(self, folder: Path) -> None:
        self.llama = TinyLlama(folder / "model", num_hidden_layers=TARGET_LAYERS)
        self.folder = write_drafter(folder / "drafter", seed=3)
        (self.folder / "draft_vocabulary.json").write_text(json.dumps({"token_ids": list(range(VOCAB))}))
        self.answers = [self._answer(number, taken) for number, taken in enumerate(TAKEN)]
        target = Target(self.llama.folder, "float32")
        self.examples: list[Example] = Extractor(target, (0, 2))([Conversation(*answer) for answer in self.answers])

    def _answer(self, seed: int, taken: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        draw, reference = random.Random(seed), Reference(self.folder, self.llama.model)
        text = [draw.randrange(2, VOCAB) for _ in range(6)]
        prompt = len(text) - 1
        for count in taken:
            draft = reference.propose(text, SLOTS).token_ids
            other = draw.choice([token for token in range(2, VOCAB) if token not in draft])
            text += [*draft[:count], other]
        return tuple(text[:prompt]), tuple(text[prompt:])

    def drafter(self, folder: Path) -> Drafter:
        return Drafter(folder, self.llama.folder, VOCAB, torch.float32)

    def right(self) -> dict[str, list[float]]:
        """Share of right tokens by position over all anchors, by the package, one block after the other."""
        hits: dict[str, list[list[bool]]] = {path: [[] for _ in range(K)] for path in ("walk", "unary", "oracle")}
        for prompt, answer in self.answers:
            walks, rows = (Reference(self.folder, self.llama.model) for _ in range(2))
            text = [*prompt, *answer]
            for length in range(len(prompt) + 1, len(text)):
                walk = walks.propose(text[:length], SLOTS).token_ids
                with torch.inference_mode():
                    hidden = rows.hidden(text[:length], SLOTS)[:, 1:]
                    best = rows.model.compute_logits(hidden, self.llama.model.lm_head)[0].topk(16).indices.tolist()
                for k, token in enumerate(text[length : length + K]):
                    hits["walk"][k].append(walk[k] == token)
                    hits["unary"][k].append(best[k][0] == token)
                    hits["oracle"][k].append(token in best[k])
        return {path: [sum(column) / len(column) for column in columns] for path, columns in hits.items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("offline"))


def test_drafts_are_the_packages(scene: Scene) -> None:
    found, right = scene.drafter(scene.folder).over(scene.examples), scene.right()
    assert found.anchors == sum(len(answer) - 1 for _, answer in scene.answers)
    for path, columns in right.items():
        assert found.recall[path] == pytest.approx(columns), path
    assert right["walk"] != right["unary"] and max(right["walk"]) > 0.1
    steps = [count + 1 for taken in TAKEN for count in taken]
    assert found.length["walk"] == pytest.approx(sum(steps) / len(steps))
    assert found.length["unary"] < found.length["walk"] < found.length["oracle"]
    low, high = found.intervals["walk"]
    assert low < found.length["walk"] < high
    assert len(found.own) == 2 and all(0 < share < 1 for share in found.own)


def test_without_selector_the_walk_is_the_heads(scene: Scene, tmp_path: Path) -> None:
    whole = scene.drafter(scene.folder).over(scene.examples)
    bare = scene.drafter(without_selector(scene.folder, tmp_path / "bare")).over(scene.examples)
    assert bare.recall["walk"] == bare.recall["unary"] == whole.recall["unary"]
    assert bare.recall["oracle"] == whole.recall["oracle"]
    dflash = write_drafter(tmp_path / "dflash", "dflash")
    with pytest.raises(CheckpointError, match="no selector"):
        without_selector(dflash, tmp_path / "none")


@pytest.mark.parametrize(
    ("lengths", "steps"), [([1, 1, 1], 3), ([3, 9, 9], 1), ([8, 1], 1), ([2, 9, 1], 2), ([1, 8, 1, 1], 2), ([], 0)]
)
def test_hops(lengths: list[int], steps: int) -> None:
    assert walked(lengths) == (len(lengths), steps)
