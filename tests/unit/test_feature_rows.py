"""Feature rows through a real engine: a drafter gets what transformers computes, however the engine got there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.verifier.allocation import Policy
from services.verifier.request import Request
from services.verifier.target import Target
from tests.support.engine_harness import request
from tests.support.rows_drafter import RowsDrafter, projection, rows_by_formula
from tests.support.scripted_drafter import partly
from tests.support.stepping import Stepping
from tests.support.tiny_llama import TinyLlama

VOCAB, PAGE, COUNT, K = 330, 8, 14, 3
A, B = projection(1), projection(2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(Path(tmp_path_factory.mktemp("model")), num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(llama: TinyLlama) -> Target:
    return Target(llama.folder, "float32")


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


SHARED = ids(40, 0)
PROMPTS = {"a": [*SHARED, 5], "b": [*SHARED, 6, 7], "c": ids(21, 1), "d": ids(3, 2)}


class Scene:
    """An engine and a drafter that is right more often than not."""

    def __init__(self, llama: TinyLlama, target: Target, limits: dict[str, Any] | None = None, **engine: Any) -> None:
        self.llama = llama
        self.said = {name: prompt + llama.generate(prompt, COUNT + K) for name, prompt in PROMPTS.items()}
        self.drafter = RowsDrafter(partly(self.said, VOCAB, 3, 0.7), A, **(limits or {}))
        self.run = Stepping(target, k=K, drafter=self.drafter, **engine)

    def request(self, name: str, text: str = "", count: int = COUNT) -> Request:
        """`text` names the prompt."""
        self.said[name] = self.said[text or name]
        return request(name, PROMPTS[text or name], count)

    def play(self, *names: str) -> None:
        """Their requests, to their ends; the text is what plain decoding says."""
        for name, answer in self.run.play(*(self.request(name) for name in names)).items():
            prompt = PROMPTS[name]
            self.llama.assert_same(prompt, answer.tokens, self.said[name][len(prompt) :][:COUNT])

    def check(self, *names: str) -> None:
        """The rows each session had when it was last asked are right."""
        for name in names:
            told = self.drafter.told[name]
            wanted = rows_by_formula(self.llama, self.drafter.weights, told.tokens)
            torch.testing.assert_close(told.rows, wanted[told.first : -1], atol=2e-4, rtol=1e-4)

    def decode_steps(self, name: str) -> list[int]:
        """Lengths at which the request could draft: it decoded, and had more than a token to go."""
        updates = [update for update in self.run.answers[name].updates if update.decode_step and update.tokens]
        return [update.base_length for update in updates if update.base_length < len(PROMPTS[name]) + COUNT - 1]

    def asked(self, name: str) -> list[int]:
        """Lengths at which it was drafted for."""
        return [length for other, length in self.drafter.asked if other == name]


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_pages": 11},
        {"prefix_caching": False},
        {"num_pages": 12, "page_size": 7},
    ],
)
def test_rows_are_what_transformers_computes(llama: TinyLlama, target: Target, engine: dict[str, Any]) -> None:
    """Chunks of a prompt, drafts half rejected, shared pages, pre-emption."""
    scene = Scene(llama, target, page_size=engine.pop("page_size", PAGE), **engine)
    scene.play("a", "b", "c", "d")
    scene.check("a", "b", "c", "d")
    if engine.get("num_pages"):
        assert scene.run.engine.load().stats.preemptions
    assert scene.run.engine.load().stats.accepted > 0


def test_a_prefix_hit_loses_no_draft(llama: TinyLlama, target: Target) -> None:
    scene = Scene(llama, target)
    scene.play("a")
    scene.play("b")
    assert scene.run.cached("b") == 40
    scene.check("a", "b")
    for name in "ab":
        assert scene.asked(name) == scene.decode_steps(name)


def test_a_drafter_that_starts_again_is_told_all_rows(llama: TinyLlama, target: Target) -> None:
    """While it is away rows go on being made; nothing is computed twice."""
    scene = Scene(llama, target)
    scene.run.submit(scene.request("a"), scene.request("c"))
    scene.run.until(lambda: len(scene.asked("c")) == 2)
    scene.drafter.lose()
    for _ in range(3):
        scene.run.step()
    assert scene.run.rows[-3:] == [2, 2, 2]
    scene.drafter.reconnect()
    before = list(scene.drafter.asked)
    scene.run.step()
    assert [name for name, _ in scene.drafter.asked[len(before) :]] == ["a", "c"] and scene.run.rows[-1] <= 2 + 2 * K
    scene.run.until(lambda: not scene.run.engine.busy)
    scene.check("a", "c")


def test_rows_of_another_projection_are_never_sent(llama: TinyLlama, target: Target) -> None:
    """RowsDrafter refuses them; who began before the change ends without drafts, who comes later has them at once."""
    scene = Scene(llama, target)
    scene.run.submit(scene.request("a", count=40))
    scene.run.until(lambda: len(scene.asked("a")) == 2)
    scene.drafter.lose()
    scene.drafter.weights = B
    scene.drafter.reconnect()
    before = len(scene.asked("a"))
    scene.run.submit(scene.request("b"))
    scene.run.until(lambda: not scene.run.engine.busy)
    assert len(scene.asked("a")) == before
    assert scene.run.cached("b") == 0 and len(scene.asked("b")) > 2
    scene.check("b")
    assert scene.run.play(scene.request("again", "b")) and scene.run.cached("again") == 40  # now with rows of B
    scene.check("again")


def test_a_first_drafter_that_comes_late(llama: TinyLlama, target: Target) -> None:
    """KV without rows does not count as found."""
    scene = Scene(llama, target)
    scene.drafter.lose()
    scene.play("a")
    assert not scene.run.engine._features.taps
    scene.drafter.reconnect()
    scene.play("b")
    assert scene.run.cached("b") == 0 and scene.asked("b")
    scene.check("b")


def test_lost_rows_are_sent_again(llama: TinyLlama, target: Target) -> None:
    scene = Scene(llama, target)
    scene.run.submit(scene.request("a"))
    scene.run.until(lambda: len(scene.asked("a")) == 1)
    for rows in (17, 0):
        scene.drafter.keep("a", rows)
        asked = len(scene.asked("a"))
        scene.run.step()
        assert len(scene.asked("a")) == asked
        scene.run.step()
        assert len(scene.asked("a")) == asked + 1
    assert scene.run.drafting.counters.resyncs == 2
    scene.check("a")


@pytest.mark.parametrize("limit", [{"max_rows": 9}, {"max_message_bytes": 2 * 9 * 24 * 4 + 100}])
def test_long_texts_are_told_in_pieces(llama: TinyLlama, target: Target, limit: dict[str, int]) -> None:
    """Meanwhile those who lack little draft in every step."""
    scene = Scene(llama, target, limit)
    scene.run.submit(scene.request("d"))
    scene.run.until(lambda: len(scene.asked("d")) == 1)
    scene.run.submit(scene.request("a"))
    scene.run.until(lambda: bool(scene.asked("a")))
    assert len(scene.asked("d")) == len(scene.decode_steps("d")) >= 4
    scene.run.until(lambda: not scene.run.engine.busy)
    scene.check("a", "d")
    commits = [commit for message in scene.drafter.requests for commit in message.commits]
    assert max(commit.feature_rows.shape[0] for commit in commits if commit.HasField("feature_rows")) <= 9


def test_a_drafter_with_a_window_gets_no_more_than_that(llama: TinyLlama, target: Target) -> None:
    scene = Scene(llama, target, {"window": 12, "kv_tokens": 11})
    scene.play("a")
    told = scene.drafter.told["a"]
    assert told.first == len(PROMPTS["a"]) + 1 - 12
    scene.check("a")
    assert scene.asked("a")[0] == len(PROMPTS["a"]) + 1


def test_a_window_leaves_rows_of_another_projection_behind(llama: TinyLlama, target: Target) -> None:
    """Once the window holds none but its own a drafter drafts for a request that began with another."""
    scene = Scene(llama, target, {"window": 12})
    scene.run.submit(scene.request("a", count=40))
    scene.run.until(lambda: len(scene.asked("a")) == 2)
    scene.drafter.lose()
    scene.drafter.weights = B
    scene.drafter.reconnect()
    before = len(scene.asked("a"))
    scene.run.until(lambda: not scene.run.engine.busy)
    later = scene.asked("a")[before:]
    assert later and later[0] > scene.asked("a")[before - 1] + 11
    scene.check("a")


def test_a_windowed_session_that_lags_begins_again(llama: TinyLlama, target: Target) -> None:
    """Nor is it sent rows that have left the window when some are lost."""
    scene = Scene(llama, target, {"window": 6})
    scene.run.submit(scene.request("a", count=40))
    scene.run.until(lambda: len(scene.asked("a")) == 1)
    scene.run.engine.set_policy(Policy("off", 0, (1, 2)))
    for _ in range(8):
        scene.run.step()
    scene.run.engine.set_policy(Policy("fixed:3", K, (1, 3)))
    scene.run.step()
    assert len(scene.asked("a")) == 2
    told = scene.drafter.told["a"]
    assert told.first == len(told.tokens) - 6 and len(scene.drafter.requests[-1].opens) == 1
    scene.check("a")
    scene.drafter.keep("a", 0)
    scene.run.step()
    scene.run.step()
    assert len(scene.asked("a")) == 3
    told = scene.drafter.told["a"]
    assert told.first == len(told.tokens) - 6
    scene.check("a")


def test_room_of_the_drafter_goes_to_the_oldest(llama: TinyLlama, target: Target) -> None:
    """41 + 14 tokens and 21 + 14 do not fit 70: the younger drafts while there is room, the older to its end."""
    scene = Scene(llama, target, {"kv_tokens": 70})
    answers = scene.run.play(scene.request("a"), scene.request("c"))
    assert len(answers["a"].tokens) == len(answers["c"].tokens) == COUNT
    assert 0 < len(scene.asked("c")) < len(scene.decode_steps("c"))
    assert scene.asked("a") == scene.decode_steps("a")
    scene.check("a")


def test_who_did_not_draft_is_caught_up(llama: TinyLlama, target: Target) -> None:
    scene = Scene(llama, target)
    scene.run.submit(scene.request("a"))
    scene.run.until(lambda: len(scene.asked("a")) == 1)
    scene.run.engine.set_policy(Policy("off", 0, (1, 2)))
    for _ in range(4):
        scene.run.step()
    messages = len(scene.drafter.requests)
    scene.run.engine.set_policy(Policy("fixed:3", K, (1, 3)))
    scene.run.step()
    assert len(scene.drafter.requests) == messages + 1 and len(scene.asked("a")) == 2
    scene.check("a")
