"""A drafter's config.json: published files as they are, every spelling of a value, and one clear line for the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import CheckpointError
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.model.rope_parameters import Linear, RopeParameters
from tests.support.tiny_drafter import config_of

SLIDING, FULL = "sliding_attention", "full_attention"
TAPS = [1, 9, 17, 25, 33]

# Published files, as draft-model contracts 1.1 to 1.3 list them.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 36,
    "num_hidden_layers": 5,
    "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": 151669},
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_types": [FULL] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
QWEN38_27B: dict[str, Any] = {
    **{key: value for key, value in QWEN3_8B.items() if key not in ("block_size", "rope_theta", "rope_scaling")},
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [SLIDING] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "max_position_embeddings": 262144,
    "vocab_size": 248320,
    "dflash_config": {
        "block_size": 8,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "mask_token_id": 248070,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
DEEPSPEC_DFLASH: dict[str, Any] = {
    **{key: value for key, value in QWEN3_8B.items() if key != "dflash_config"},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "target_layer_ids": TAPS,
    "mask_token_id": 151669,
    "num_anchors": 512,
    "enable_confidence_head": False,
    "markov_rank": 0,
}
_LAYER_KEYS = ("block_size", "dflash_config", "num_target_layers", "auto_map", "architectures")
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "block_size": 8,
    "mask_token_id": 151669,
    "draft_vocab_size": 151936,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "target_hidden_size": None,
    "sample_from_anchor": False,
    "shift_label": False,
    "projector_type": "dflash",
    "sliding_window_non_causal": False,
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 8}]},
    "transformer_layer_config": {key: value for key, value in QWEN3_8B.items() if key not in _LAYER_KEYS},
}


def read(folder: Path, config: dict[str, Any]) -> DraftArch:
    (folder / "config.json").write_text(json.dumps(config))
    return read_draft_arch(folder)


def tiny(folder: Path, kind: str = "dflash2", without: tuple[str, ...] = (), **top: Any) -> DraftArch:
    """The tiny drafter's config without some keys, wherever they stood, and with others at the top.

    `dflash_config` is changed key by key.
    """
    config = config_of(kind)
    kept = {key: value for key, value in config.pop("dflash_config").items() if key not in without}
    nested = kept | top.pop("dflash_config", {})
    config = {key: value for key, value in config.items() if key not in without}
    return read(folder, {**config, **top, "dflash_config": nested})


def refused(folder: Path, *args: Any, **changes: Any) -> str:
    """The error's message: one line, after the file's name."""
    with pytest.raises(CheckpointError) as caught:
        tiny(folder, *args, **changes)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{folder / 'config.json'}: "), message
    return message.removeprefix(f"{folder / 'config.json'}: ")


def test_published_dflash(tmp_path: Path) -> None:
    arch = read(tmp_path, QWEN3_8B)
    assert (arch.kind, arch.block_size, arch.first_slot, arch.max_draft_tokens) == ("dflash", 16, 1, 15)
    assert (arch.taps, arch.mask_token_id, arch.num_target_layers) == ((1, 9, 17, 25, 33), 151669, 36)
    assert (arch.hidden_size, arch.intermediate_size, arch.num_layers) == (4096, 12288, 5)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.attention_bias) == (32, 8, 128, False)
    assert (arch.vocab_size, arch.max_position, arch.rms_norm_eps) == (151936, 40960, 1e-6)
    assert (arch.rope, arch.target_hidden_size) == (RopeParameters(1e6), 4096)
    assert (arch.windows, arch.window, arch.causal) == ((0,) * 5, 0, (False,) * 5)
    assert (arch.conv_taps, arch.selector_rank, arch.selector_top_k) == (0, 0, 16)
    assert (arch.output_multiplier, arch.softcap, arch.embedding_scale) == (1.0, 0.0, 1.0)


def test_published_dflash2(tmp_path: Path) -> None:
    arch = read(tmp_path, QWEN38_27B)
    assert (arch.kind, arch.block_size, arch.first_slot, arch.max_draft_tokens) == ("dflash2", 8, 1, 7)
    assert (arch.taps, arch.mask_token_id) == ((5, 19, 33, 47, 61), 248070)
    assert (arch.windows, arch.window, arch.causal) == ((2048,) * 5, 2048, (False,) * 5)
    assert (arch.conv_taps, arch.conv_group, arch.selector_rank, arch.selector_top_k) == (2, 16, 256, 16)
    assert arch.rope == RopeParameters(1e7)


def test_deepspec_dflash_predicts_from_the_anchors_slot(tmp_path: Path) -> None:
    arch = read(tmp_path, DEEPSPEC_DFLASH)
    assert (arch.kind, arch.block_size, arch.first_slot, arch.max_draft_tokens) == ("dflash", 7, 0, 7)
    assert (arch.taps, arch.mask_token_id) == ((1, 9, 17, 25, 33), 151669)


def test_speculators_file_is_the_published_one(tmp_path: Path) -> None:
    """Other keys, the layers in an object of their own, taps counted from the embeddings: the same drafter."""
    same = {**QWEN3_8B, "dflash_config": {**QWEN3_8B["dflash_config"]}, "block_size": 8}
    del same["num_target_layers"]
    assert read(tmp_path, SPECULATORS) == read(tmp_path, same)


def test_mixed_windows(tmp_path: Path) -> None:
    """A drafter with one full layer can read all rows; without a flag its sliding layers are causal."""
    arch = read(tmp_path, {**QWEN3_8B, **sliding([SLIDING] * 4 + [FULL], 2048)})
    assert (arch.windows, arch.window) == ((2048, 2048, 2048, 2048, 0), 0)
    assert arch.causal == (True, True, True, True, False)


def sliding(kinds: list[str] | None, window: int, **more: Any) -> dict[str, Any]:
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True, **more}


@pytest.mark.parametrize(
    ("without", "changes", "field", "value"),
    [
        (["block_size"], {"block_size": 5}, "block_size", 5),
        (["block_size"], {"dspark_block_size": 5}, "block_size", 5),
        ([], {"block_size": 8}, "block_size", 8),  # twice, but the same
        (["target_layer_ids"], {"target_layer_ids": [1, 2]}, "taps", (1, 2)),
        (["target_layer_ids"], {"dspark_target_layer_ids": [1, 2]}, "taps", (1, 2)),
        (["target_layer_ids"], {"aux_hidden_state_layer_ids": [1, 3]}, "taps", (0, 2)),
        (["target_layer_ids"], {"eagle_aux_hidden_state_layer_ids": [1, 3]}, "taps", (0, 2)),
        ([], {"aux_hidden_state_layer_ids": [1, 3]}, "taps", (0, 2)),
        (["mask_token_id"], {"mask_token_id": 7}, "mask_token_id", 7),
        (["mask_token_id"], {"dspark_noise_token_id": 7}, "mask_token_id", 7),
        (["mask_token_id"], {"dspark_config": {"mask_token_id": 7}}, "mask_token_id", 7),
        (["mask_token_id"], {}, "mask_token_id", None),
        (["rope_parameters"], {"rope_theta": 5e5}, "rope", RopeParameters(5e5)),
        (
            ["rope_parameters"],
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope",
            RopeParameters(5e5, Linear(2.0)),
        ),
        ([], {"rope_parameters": {FULL: {"rope_theta": 7.0}, SLIDING: {"rope_theta": 8.0}}}, "rope", RopeParameters(7)),
        ([], {"is_neox_style": True, "rope_is_neox_style": True}, "rope", RopeParameters(1e4)),
        ([], {"partial_rotary_factor": 1.0}, "rope", RopeParameters(1e4)),
        ([], {"is_causal": True}, "causal", (True, True)),
        (["is_causal"], {"dflash_config": {"causal": True}}, "causal", (True, True)),
        (["is_causal"], {}, "causal", (False, False)),
        (["is_causal"], sliding([SLIDING, FULL], 6), "causal", (True, False)),
        (["is_causal"], sliding([SLIDING, FULL], 6, sliding_window_non_causal=True), "causal", (False, False)),
        (["is_causal"], sliding([SLIDING, FULL], 6, sliding_window_non_causal=False), "causal", (True, False)),
        ([], sliding([SLIDING, FULL], 6), "windows", (6, 0)),
        ([], sliding(None, 6, max_window_layers=1), "windows", (0, 6)),
        ([], sliding(None, 6), "windows", (0, 0)),
        ([], {"layer_types": None}, "windows", (0, 0)),
        ([], {"layer_types": [SLIDING] * 2, "dflash_config": {"use_swa": True, "swa_window_size": 6}}, "window", 6),
        ([], {"sample_from_anchor": True}, "first_slot", 0),
        ([], {"sample_from_anchor": False}, "first_slot", 1),
        ([], {"shift_label": False}, "first_slot", 1),
        ([], {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, "max_draft_tokens", 7),
        ([], {"draft_vocab_size": 330}, "vocab_size", 330),
        ([], {"target_hidden_size": 96}, "target_hidden_size", 96),
        ([], {"has_embed_tokens": True}, "own_embedding", True),
        ([], {"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier", 0.5),
        ([], {"logit_scale": 0.5}, "output_multiplier", 0.5),
        ([], {"final_logit_softcapping": 30}, "softcap", 30.0),
        ([], {"final_logit_softcapping": None}, "softcap", 0.0),
        ([], {"final_logit_softcapping": -1}, "softcap", 0.0),
        ([], {"dflash_config": {"input_embedding_scale": 8.0}}, "embedding_scale", 8.0),
        ([], {"dflash_config": {"projector_type": "dflash"}}, "kind", "dflash2"),
        (["conv_kernel_size", "conv_group_size"], {}, "conv_taps", 0),
        (["selector_rank", "selector_top_k"], {}, "selector_rank", 0),
        ([], {"attention_bias": True}, "attention_bias", True),
    ],
)
def test_spellings(tmp_path: Path, without: list[str], changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(tiny(tmp_path, without=tuple(without), **changes), field) == value


def test_flat_dflash2(tmp_path: Path) -> None:
    """All keys at the top, no object."""
    flat = config_of()
    flat |= {**flat.pop("dflash_config"), "architectures": ["Qwen3DFlash2Model"]}
    assert read(tmp_path, flat) == read(tmp_path, config_of())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 16}, "dflash_config.block_size is 8, but block_size is 16"),
        ({"mask_token_id": 5}, "dflash_config.mask_token_id is 329, but mask_token_id is 5"),
        ({"dspark_noise_token_id": 5}, "dflash_config.mask_token_id is 329, but dspark_noise_token_id is 5"),
        ({"target_layer_ids": [1, 2]}, "dflash_config.target_layer_ids is [0, 2], but target_layer_ids is [1, 2]"),
        (
            {"aux_hidden_state_layer_ids": [0, 2]},
            "dflash_config.target_layer_ids is [0, 2], but aux_hidden_state_layer_ids is [0, 2], "
            "which is [-1, 1] counted as layer outputs",
        ),
        ({"dflash_config": {"causal": True}}, "is_causal is False, but dflash_config.causal is True"),
        ({"conv_kernel_size": 3}, "dflash_config.conv_kernel_size is 2, but conv_kernel_size is 3"),
        ({"transformer_layer_config": {"hidden_size": 32}}, "transformer_layer_config.hidden_size is 32, but"),
        (sliding([SLIDING] * 2, 6, dflash_config={"swa_window_size": 7}), "sliding_window is 6, but dflash_config.swa"),
        ({"output_multiplier": 2.0, "logit_scale": 3.0}, "output_multiplier is 2.0, but logit_scale is 3.0"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0, but in rope_parameters it is 10000.0"),
    ],
)
def test_contradictions(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert refused(tmp_path, **changes).startswith(says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "architectures is ['MuseGlimmerAssistantModel'], supported"),
        ({"architectures": None}, "architectures is None, supported is one of DFlashDraftModel, "),
        ({"architectures": ["DFlashDraftModel"]}, "conv_kernel_size is 2, supported is none for DFlash"),
        ({"model_type": "gemma4"}, "model_type is 'gemma4', supported is 'qwen3' or "),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported is 'silu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}, supported"),
        ({"dflash_config": {"projector_type": "domino"}}, "dflash_config.projector_type is 'domino', supported"),
        ({"dflash_config": {"projector_type": "new"}}, "dflash_config.projector_type is 'new', supported is 'dflash'"),
        ({"dflash_config": {"shift_label": True}}, "dflash_config.shift_label is True, supported is False"),
        ({"dflash_config": {"attention_sink_bias": True}}, "dflash_config.attention_sink_bias is True, supported"),
        ({"attention_value_scale": 0.7}, "attention_value_scale is 0.7, supported is 1.0"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is True, supported is False"),
        ({"is_neox_style": False}, "is_neox_style is False, supported is True"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is False, supported is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, supported is 1"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100, supported is 330"),
        ({"dflash_config": {"use_swa": True}}, "dflash_config.use_swa is True, supported is layer_types with sliding_"),
        ({"layer_types": [SLIDING] * 2}, "use_sliding_window is None, supported is true for sliding_attention layers"),
        (sliding([SLIDING] * 2, 0), "sliding_window is 0, supported is a positive integer"),
        ({"layer_types": [FULL]}, "layer_types is ['full_attention'], supported is 2 times full_attention or sliding"),
        ({"layer_types": [FULL, "linear_attention"]}, "layer_types is ['full_attention', 'linear_attention'], support"),
        (
            sliding([SLIDING, FULL], 6, rope_parameters={FULL: {"rope_theta": 7.0}, SLIDING: {"rope_theta": 8.0}}),
            "rope_parameters is {'full_attention': {'rope_theta': 7.0}, 'sliding_attention': {'rope_theta': 8.0}}, sup",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 7.0}}},
            "rope_parameters is {'sliding_attention': {'rope_theta': ",
        ),
        (
            {"rope_parameters": {FULL: [7.0]}},
            "rope_parameters is {'full_attention': [7.0]}, supported is the same object",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"mask_token_id": "<|MASK|>"}, "dflash_config.mask_token_id is 329, but mask_token_id is '<|MASK|>'"),
        ({"dflash_config": {"mask_token_id": "<|MASK|>"}}, "dflash_config.mask_token_id is '<|MASK|>', supported is a"),
        ({"dflash_config": {"mask_token_id": 330}}, "dflash_config.mask_token_id is 330, supported is a token id from"),
        ({"dflash_config": {"target_layer_ids": [2, 0]}}, "dflash_config.target_layer_ids is [2, 0], supported is a l"),
        ({"dflash_config": {"target_layer_ids": [0, 0]}}, "dflash_config.target_layer_ids is [0, 0], supported is a l"),
        ({"dflash_config": {"target_layer_ids": [-1, 0]}}, "dflash_config.target_layer_ids is [-1, 0], supported is l"),
        ({"dflash_config": {"target_layer_ids": [0, 3]}}, "dflash_config.target_layer_ids is [0, 3], supported is lay"),
        ({"dflash_config": {"target_layer_ids": []}}, "dflash_config.target_layer_ids is [], supported is a list"),
        ({"dflash_config": {"target_layer_ids": None}}, "target_layer_ids is None, supported is a list"),
        ({"dflash_config": {"block_size": 1}}, "block_size is 1, supported is at least 2"),
        ({"dflash_config": {"block_size": None}}, "block_size is None, supported is a positive integer"),
        ({"dflash_config": {"block_size": True}}, "dflash_config.block_size is True, supported is a positive integer"),
        ({"dflash_config": {"conv_group_size": None}}, "conv_group_size is None, supported is a positive integer"),
        ({"dflash_config": {"selector_rank": None}}, "selector_rank is None, supported is a positive integer"),
        ({"dflash_config": {"selector_top_k": None}}, "selector_top_k is None, supported is a positive integer"),
        ({"dflash_config": {"conv_group_size": 7}}, "conv_group_size is 7, supported is a divisor of hidden_size, 64"),
        ({"dflash_config": {"selector_top_k": 331}}, "selector_top_k is 331, supported is at most vocab_size, 330"),
        ({"dflash_config": {"output_multiplier": 0}}, "dflash_config.output_multiplier is 0, expected a positive"),
        ({"dflash_config": {"output_multiplier": -1.0}}, "dflash_config.output_multiplier is -1.0, expected a"),
        ({"final_logit_softcapping": "x"}, "final_logit_softcapping is 'x', expected a positive number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, supported is a divisor of num_attention_heads, 4"),
        ({"head_dim": 15}, "head_dim is 15, supported is an even number"),
        ({"hidden_size": None}, "hidden_size is None, supported is a positive integer"),
        ({"is_causal": 0}, "is_causal is 0, supported is true or false"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a positive number"),
        ({"dspark_config": [1]}, "dspark_config is [1], supported is an object"),
        (sliding(None, 6, max_window_layers="x"), "max_window_layers is 'x', supported is an integer"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert refused(tmp_path, **changes).startswith(says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"markov_rank": 256}, "markov_rank is 256, supported is 0"),
        ({"dspark_markov_rank": 256}, "dspark_markov_rank is 256, supported is 0"),
        ({"dflash_config": {"markov_rank": 256, "projector_type": "dspark"}}, "dflash_config.markov_rank is 256, supp"),
        ({"dspark_config": {"markov_rank": 256}}, "dspark_config.markov_rank is 256, supported is 0"),
        ({"enable_confidence_head": True}, "enable_confidence_head is True, supported is False"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures is ['Gemma4DSparkModel'], supported is one of"),
        ({"architectures": ["DFlashDraftModel"], "projector_type": "dspark"}, "projector_type is 'dspark', supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size is None, supported is a positive integer for DFl"),
    ],
)
def test_dspark_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """Its heads are another family's; without heads it is a DFlash drafter of another slot convention."""
    base = {"architectures": ["Qwen3DSparkModel"]}
    assert refused(tmp_path, "dflash", **{**base, **changes}).startswith(says)
    assert tiny(tmp_path, "dflash", **base).first_slot == 0
    assert tiny(tmp_path, "dflash", architectures=["DSparkDraftModel"], projector_type="dspark").first_slot == 0


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_draft_arch(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_draft_arch(tmp_path)
