"""Features: hidden states and probabilities are those of transformers, on any device, and made once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from kadence.errors import ConfigError
from tests.support import tiny_model
from tests.support.mock_device import MockCuda
from tests.support.tiny_llama import TinyLlama
from training import features
from training.conversations import LONGEST, Conversation
from training.examples import Cache, Example
from training.features import LIKELIEST, Extractor, extend, load

TAPS = (0, 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("features") / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    """Of many lengths, the longest possible among them: more than one pass."""
    draw = random.Random(0)
    sizes = [(3, 2), (1, 40), (17, 15), (200, 312), (16, 16), (90, 300), (5, 400), (33, 7)]
    assert max(map(sum, sizes)) == LONGEST
    ids = [[draw.randrange(tiny_model.VOCAB_SIZE) for _ in range(prompt + answer)] for prompt, answer in sizes]
    return [Conversation(tuple(row[:prompt]), tuple(row[prompt:])) for row, (prompt, _) in zip(ids, sizes, strict=True)]


def extractor(llama: TinyLlama, taps: tuple[int, ...] = TAPS) -> Extractor:
    return Extractor(load(llama.folder, torch.float32, torch.device("cpu")), taps)


@torch.inference_mode()
def test_features_are_those_of_transformers(llama: TinyLlama, conversations: list[Conversation]) -> None:
    examples = extractor(llama)(conversations)
    assert len(examples) == len(conversations)
    for conversation, example in zip(conversations, examples, strict=True):
        tokens = [*conversation.prompt, *conversation.response]
        out = llama.model(torch.tensor([tokens]), output_hidden_states=True)
        assert example.tokens.tolist() == tokens and example.prompt == len(conversation.prompt)
        # hidden_states[0] is the embedding: layer i gives hidden_states[i + 1].
        taps = torch.cat([out.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)
        assert torch.allclose(example.taps, taps, atol=1e-4, rtol=1e-4)
        # The token at position i is foretold at i - 1.
        p = out.logits[0].softmax(-1)[example.prompt - 1 : -1]
        assert example.p.shape == example.ids.shape == (len(conversation.response), LIKELIEST)
        assert torch.allclose(example.p, p.topk(LIKELIEST).values, atol=1e-5)
        assert torch.allclose(example.p, p.gather(1, example.ids), atol=1e-5)


def test_what_runs_beside_a_conversation_does_not_matter(llama: TinyLlama, conversations: list[Conversation]) -> None:
    extract = extractor(llama)
    for one, other in zip(extract(conversations), reversed(extract(conversations[::-1])), strict=True):
        same(one, other)


def test_features_are_made_on_another_device(llama: TinyLlama, conversations: list[Conversation]) -> None:
    with MockCuda():
        target = load(llama.folder, torch.float32, torch.device("cuda"))
        assert target.device.type == "cuda"
        there = Extractor(target, TAPS)(conversations[:3])
    for one, other in zip(there, extractor(llama)(conversations[:3]), strict=True):
        assert type(one.taps) is type(one.ids) is type(one.p) is torch.Tensor  # on the host
        same(one, other)


def same(one: Example, other: Example) -> None:
    assert torch.equal(one.tokens, other.tokens) and one.prompt == other.prompt
    assert torch.allclose(one.taps, other.taps, atol=1e-4, rtol=1e-4)
    assert torch.allclose(one.p, other.p, atol=1e-5)


@pytest.mark.parametrize("taps", [(), (2, 0), (1, 1), (0, 4), (-1, 2)])
def test_wrong_taps_are_told(llama: TinyLlama, taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"taps are \[.*\]; ascending layers of 0 to 3 are needed"):
        extractor(llama, taps)


def test_a_folder_gets_what_it_lacks(
    llama: TinyLlama, conversations: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run that was killed, and when the data has grown: each conversation once."""
    monkeypatch.setattr(features, "_CHUNK", 2)
    made: list[Conversation] = []
    extract = extractor(llama)
    run = extract._run
    monkeypatch.setattr(extract, "_run", lambda part: made.extend(part) or run(part))
    folder = tmp_path / "features"
    extend(folder, conversations[:3], extract)
    first = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(first) == 2 and made == conversations[:3]
    extend(folder, conversations, extract)
    assert made == conversations and all(path.read_bytes() == content for path, content in first.items())
    cache = Cache(folder)
    assert sorted(cache.digest(i) for i in range(8)) == sorted(c.digest.hex() for c in conversations)
    assert (len(cache), cache.taps, cache.model) == (8, TAPS, extract.origin.model)
    extend(folder, conversations, extract)
    assert len(made) == 8


def test_features_of_other_taps_or_another_model_are_not_mixed(
    llama: TinyLlama, conversations: list[Conversation], tmp_path: Path
) -> None:
    extend(tmp_path, conversations[:1], extractor(llama))
    with pytest.raises(ConfigError, match="taps of the features there is 0,2, not 0,3"):
        extend(tmp_path, conversations, extractor(llama, (0, 3)))
    other = TinyLlama(tmp_path / "model", seed=1, num_hidden_layers=4)
    with pytest.raises(ConfigError, match=r"model of the features there is \w{32}, not \w{32}"):
        extend(tmp_path, conversations, extractor(other))
    assert len(Cache(tmp_path)) == 1


def test_command(llama: TinyLlama, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(json.dumps({"prompt_ids": [5, 6, 7], "response_ids": [8, 9]}) + "\n")
    arguments = ["--data", str(data), "--model", str(llama.folder), "--taps", "0,2", "--out", str(out)]
    assert features.main(arguments) == 0
    assert "1 of 1, 5 tokens, " in capsys.readouterr().out
    (example,) = Cache(out)
    assert example.tokens.tolist() == [5, 6, 7, 8, 9] and example.taps.dtype == torch.bfloat16
    for more, told in (
        (["--taps", "0,9"], "taps are [0, 9]; ascending layers of 0 to 3 are needed"),
        (["--device", "nowhere"], "--device is 'nowhere': "),
        (["--data", str(tmp_path / "none.jsonl")], "none.jsonl: cannot be read"),
        (["--model", str(tmp_path)], "config.json is missing"),
    ):
        assert features.main([*arguments, *more]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and told in error and error.count("\n") == 1
