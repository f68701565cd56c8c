"""The method behind kinds dflash and dflash2: what it loads, what it refuses, and that a draft is a pure function."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kadence.errors import CheckpointError, ConfigError
from kadence.internal import common_pb2
from services.drafter.methods import (
    DraftItem,
    DraftSampling,
    FeatureRows,
    Method,
    NewTokens,
    ProposeItem,
    Setting,
    create,
)
from services.kernels.noise_ref import DRAFT, gumbel, key_tensor, noise_key
from services.runtime.config import ModelConfig
from services.verifier.target import Target
from tests.support import tiny_model
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama

WIDTH = 64
SAMPLED = DraftSampling(temperature=1.3, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(tmp_path_factory.mktemp("model"), num_hidden_layers=TARGET_LAYERS).folder


def build(model: Path, folder: Path, kind: str = "dflash2", **options: object) -> Method:
    fields = {"max_draft_tokens": 16, "max_sessions": 8, "kv_tokens": 512}
    fields = {name: options.pop(name, value) for name, value in fields.items()}  # type: ignore[assignment]
    setting = Setting(**fields, model=ModelConfig(path=str(model)))
    return create(kind, {"checkpoint": str(folder), "dtype": "float32", **options}, setting)


@pytest.fixture(scope="module")
def method(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Method:
    return build(model, write_drafter(tmp_path_factory.mktemp("drafter")))


def features(seed: int, count: int) -> torch.Tensor:
    return torch.randn((count, WIDTH), generator=torch.Generator().manual_seed(seed))


def wire(rows: torch.Tensor, base: int) -> FeatureRows:
    return FeatureRows(base, (len(rows), WIDTH), common_pb2.DTYPE_FLOAT32, rows.numpy().tobytes())


def begin(method: Method, key: int, length: int, cuts: Sequence[int] = ()) -> ProposeItem:
    """A session of `length` tokens, its rows sent in pieces; what to ask for. Text and rows depend on the key."""
    method.open(key)
    tokens, rows = [(key * 7 + i) % 300 for i in range(length)], features(key, length - 1)
    pieces = [(a, b) for a, b in itertools.pairwise([0, *cuts, length - 1]) if a < b]
    method.commit([NewTokens(key, tokens), *(NewTokens(key, [], wire(rows[a:b], a)) for a, b in pieces)])
    return ProposeItem(key, 7, base_length=length)


def ask(method: Method, item: ProposeItem, **changes: object) -> DraftItem:
    return method.propose([replace(item, **changes)])[0]  # type: ignore[arg-type]


def same(a: DraftItem, b: DraftItem) -> bool:
    laws = [(x.q_ids, x.q, x.signals) for x in (a, b)]
    return a.token_ids == b.token_ids and all(
        (x is None and y is None) or (x is not None and y is not None and x.tobytes() == y.tobytes())
        for x, y in zip(*laws, strict=True)
    )


@pytest.fixture
def items(method: Method) -> Iterator[list[ProposeItem]]:
    """Sessions 1 to 3, of different lengths."""
    yield [begin(method, key, length, cuts) for key, length, cuts in ((1, 40, [5, 6]), (2, 9, []), (3, 1, []))]
    for key in (1, 2, 3):
        method.close(key)


def test_traits(method: Method, model: Path) -> None:
    it = method.traits
    assert (it.kind, it.block_size, it.max_draft_tokens, it.taps, it.window) == ("dflash2", 8, 7, (0, 2), 0)
    assert (it.feature_width, it.vocab_size, it.kv_tokens) == (WIDTH, tiny_model.VOCAB_SIZE, 512)
    assert it.model_fingerprint == Target(model, "float32").fingerprint
    assert len(it.feature_fingerprint) == 32 and it.feature_norm_eps == 1e-6 and it.supports_ratio
    assert "entropy" in it.signals and method.inline_tokens < 0


def test_a_shorter_limit_shortens_the_block(model: Path, tmp_path: Path) -> None:
    method = build(model, write_drafter(tmp_path / "d"), max_draft_tokens=3)
    assert (method.traits.block_size, method.traits.max_draft_tokens) == (4, 3)
    assert len(ask(method, begin(method, 1, 5), max_tokens=3).token_ids) == 3


def test_projection_is_the_checkpoints_own(model: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "d", dtype=torch.bfloat16)
    method, stored = build(model, folder), load_file(folder / "model.safetensors")
    assert [it.name for it in method.projection] == ["fc.weight", "hidden_norm.weight"]
    for it in method.projection:
        assert it.dtype == common_pb2.DTYPE_BFLOAT16 and it.shape == tuple(stored[it.name].shape)
        assert bytes(it.data) == stored[it.name].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("sampling", [DraftSampling(), SAMPLED, replace(SAMPLED, rule="ratio")])
def test_alone_and_together(method: Method, items: list[ProposeItem], sampling: DraftSampling) -> None:
    asked = [replace(item, sampling=sampling, round=1) for item in items]
    together = method.propose(asked)
    for item, draft in zip(asked, together, strict=True):
        alone = ask(method, item, round=1, max_tokens=6)  # another question, so that it is computed again
        assert alone.token_ids == draft.token_ids[:6] and len(draft.token_ids) == 7
        assert np.allclose(alone.signals, draft.signals[:6], atol=1e-5)  # type: ignore[arg-type,index]
        if sampling.temperature:
            assert np.allclose(alone.q, draft.q[:6], atol=1e-5)  # type: ignore[arg-type,index]
        else:
            assert draft.q is None and draft.q_ids is None


def test_pieces_of_rows_make_the_same_draft(method: Method) -> None:
    drafts = []
    for cuts in ([], [1, 17, 30]):
        drafts.append(ask(method, begin(method, 9, 40, cuts)))
        method.close(9)
    assert drafts[0].token_ids == drafts[1].token_ids
    assert np.allclose(drafts[0].signals, drafts[1].signals, atol=1e-5)  # type: ignore[arg-type]


def test_a_round_asked_twice_gets_the_same_bytes(method: Method, items: list[ProposeItem]) -> None:
    asked = [replace(item, sampling=replace(SAMPLED, rule="ratio"), round=4) for item in items]
    first = method.propose(asked)
    again = [method.propose([item])[0] for item in asked]
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    # Rebuilt from nothing, as after a restart.
    method.close(1)
    begin(method, 1, 40)
    rebuilt = method.propose(asked)
    assert rebuilt[0].token_ids == first[0].token_ids
    assert np.allclose(rebuilt[0].q, first[0].q, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_tokens_are_drawn_with_the_noise_of_the_rule(method: Method, items: list[ProposeItem], rule: str) -> None:
    sampling = replace(SAMPLED, rule=rule)
    draft = ask(method, items[0], sampling=sampling, attempt=2, round=9)
    assert draft.q is not None and draft.q_ids is not None and np.allclose(draft.q.sum(1), 1, atol=1e-5)
    for k, token in enumerate(draft.token_ids, 1):
        key = noise_key(5, 39 + k) if rule == "match" else noise_key(5, 2, 9, k, DRAFT)
        noise = gumbel(key_tensor([key]), torch.from_numpy(draft.q_ids[k - 1])[None])[0].numpy()
        with np.errstate(divide="ignore"):
            assert token == draft.q_ids[k - 1][np.argmax(np.log(draft.q[k - 1]) + noise)]


def test_rounds_and_attempts_redraw_under_ratio_only(method: Method, items: list[ProposeItem]) -> None:
    for rule, redraws in (("match", False), ("ratio", True)):
        sampling = replace(SAMPLED, rule=rule)
        drafts = [
            ask(method, items[0], sampling=sampling, round=r, attempt=a).token_ids for r, a in ((0, 0), (1, 0), (0, 1))
        ]
        assert (len({tuple(draft) for draft in drafts}) > 1) == redraws


def test_new_tokens_and_rows_move_the_draft(method: Method) -> None:
    item = begin(method, 9, 20)
    before = ask(method, item)
    method.commit([NewTokens(9, [11, 12], wire(features(99, 2), 19))])
    after = ask(method, item, base_length=22)
    assert not np.allclose(before.signals, after.signals)  # type: ignore[arg-type]
    method.close(9)


def test_nothing_is_proposed_beyond_the_drafters_positions(model: Path, tmp_path: Path) -> None:
    method = build(model, write_drafter(tmp_path / "d", max_position_embeddings=24))
    inside, outside = begin(method, 1, 24), begin(method, 2, 25)
    drafts = method.propose([outside, inside])
    assert [len(draft.token_ids) for draft in drafts] == [0, 7]


def test_dflash(model: Path, tmp_path: Path) -> None:
    method = build(model, write_drafter(tmp_path / "d", "dflash"), "dflash")
    draft = ask(method, begin(method, 1, 12), sampling=SAMPLED)
    assert method.traits.kind == "dflash" and len(draft.token_ids) == 7 and draft.q is not None


def test_draft_vocabulary(model: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "d")
    (folder / "draft_vocabulary.json").write_text(json.dumps({"token_ids": list(range(40, 300))}))
    method = build(model, folder, draft_vocabulary=50)
    draft = ask(method, begin(method, 1, 12), sampling=SAMPLED)
    assert draft.q_ids is not None and draft.q_ids.min() >= 40 and draft.q_ids.max() < 90
    assert all(40 <= token < 90 for token in draft.token_ids)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3e38])
def test_rows_that_are_no_numbers_spoil_no_other_session(model: Path, tmp_path: Path, number: float) -> None:
    """Pages go from session to session, and attention reads to the end of a page."""
    folder = write_drafter(tmp_path / "d")
    used, fresh = build(model, folder), build(model, folder)
    for key in range(1, 8):
        used.open(key)
        used.commit([NewTokens(key, [5] * 41), NewTokens(key, [], wire(torch.full((40, WIDTH), number), 0))])
        used.propose([ProposeItem(key, 7, base_length=41)])
    for key in range(1, 8):
        used.close(key)
    drafts = [ask(method, begin(method, 9, 38), sampling=SAMPLED) for method in (used, fresh)]
    assert same(*drafts) and np.isfinite(drafts[0].signals).all()  # type: ignore[arg-type]


def test_what_cannot_start(model: Path, tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"'dflash': the checkpoint .* is a dflash2 drafter"):
        build(model, folder, "dflash")
    with pytest.raises(ConfigError, match=r"\[model\] path is required"):
        create("dflash2", {"checkpoint": str(folder)}, Setting(16, 8, 512))
    with pytest.raises(ConfigError, match=r"\[drafter.options\] checkpoint is required"):
        create("dflash2", {}, Setting(16, 8, 512, ModelConfig(path=str(model))))
    with pytest.raises(CheckpointError, match="nowhere"):
        build(model, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"~nobody-of-this-name/d: no such folder"):
        build(model, Path("~nobody-of-this-name/d"))
    with pytest.raises(ConfigError, match=r"~nobody-of-this-name/v\.json: cannot be read"):
        build(model, folder, draft_vocabulary=5, draft_vocabulary_file="~nobody-of-this-name/v.json")
    for sizes in ({"kv_tokens": 10**12}, {"max_sessions": 10**9}):  # each session has pages for its block
        with pytest.raises(ConfigError, match=r"kv_tokens = \d+ and max_sessions = \d+: take \d+ GiB, the machine has"):
            build(model, folder, **sizes)
    other = TinyLlama(tmp_path / "other", num_hidden_layers=TARGET_LAYERS + 1).folder
    with pytest.raises(ConfigError, match="num_target_layers is 4, the model's is 5"):
        build(other, folder)
