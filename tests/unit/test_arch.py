"""config.json: what is read out of it, and one clear line for everything that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import CheckpointError
from services.model.arch import read_arch
from services.model.rope_parameters import Linear, Llama3, RopeParameters, Yarn
from services.scheduler.model_folder import ModelFolder

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 330,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def folder(path: Path, **changes: Any) -> Path:
    """Writes a folder; a change to None removes the key."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_reads_all_sizes(tmp_path: Path) -> None:
    arch = read_arch(folder(tmp_path, rope_theta=5e5, dtype="bfloat16", tie_word_embeddings=True))
    assert (arch.family, arch.hidden_size, arch.intermediate_size, arch.num_layers) == ("llama", 64, 96, 2)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.group) == (4, 2, 16, 2)
    assert (arch.vocab_size, arch.max_position) == (330, 512)
    assert (arch.rope, arch.rms_norm_eps, arch.config_dtype) == (RopeParameters(5e5), 1e-5, "bfloat16")
    assert arch.tied_head
    # K and V of two layers, two KV heads, 16 numbers of two bytes.
    assert arch.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_defaults(tmp_path: Path) -> None:
    arch = read_arch(folder(tmp_path, num_key_value_heads=None, rms_norm_eps=None))
    assert (arch.num_kv_heads, arch.rms_norm_eps, arch.tied_head) == (4, 1e-6, False)
    assert (arch.rope, arch.config_dtype) == (RopeParameters(10000.0), "float32")
    assert not (arch.qkv_bias or arch.out_bias or arch.mlp_bias or arch.qk_norm)


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path: Path) -> None:
    assert read_arch(folder(tmp_path, head_dim=32)).head_dim == 32
    assert read_arch(folder(tmp_path, head_dim=32, hidden_size=50)).hidden_size == 50


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model_type": "llama", "attention_bias": True}, ["qkv_bias", "out_bias"]),
        ({"model_type": "llama", "mlp_bias": True}, ["mlp_bias"]),
        ({"model_type": "qwen2"}, ["qkv_bias"]),
        ({"model_type": "qwen2", "attention_bias": True, "mlp_bias": True}, ["qkv_bias"]),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096}, ["qkv_bias"]),
        ({"model_type": "qwen3", "head_dim": 32}, ["qk_norm"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["qkv_bias", "out_bias", "qk_norm"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, ["qk_norm"]),
    ],
)
def test_families(tmp_path: Path, changes: dict[str, Any], fields: list[str]) -> None:
    arch = read_arch(folder(tmp_path, **changes))
    assert arch.family == changes["model_type"]
    assert [name for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm") if getattr(arch, name)] == fields


def test_silent_configs_of_a_family(tmp_path: Path) -> None:
    """What transformers' own configuration class fills in."""
    for family, kv_heads, head_dim in (("llama", 64, 4), ("qwen2", 32, 4), ("qwen3", 32, 128)):
        changes = {"hidden_size": 256, "num_attention_heads": 64, "num_key_value_heads": None}
        arch = read_arch(folder(tmp_path, model_type=family, **changes))
        assert (arch.num_kv_heads, arch.head_dim) == (kv_heads, head_dim)


YARN = {"factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 1e6}, RopeParameters(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, RopeParameters(1e5)),
        ({"rope_scaling": None, "rope_theta": 2e4}, RopeParameters(2e4)),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 3e4}, RopeParameters(3e4)),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 3e4}, RopeParameters(3e4, Linear(2.0))),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5.0}},
            RopeParameters(1e4, Linear(2.0)),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            RopeParameters(5e5, Llama3(8.0, 1.0, 4.0, 512.0)),
        ),
        (
            {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 1.5, "beta_fast": None, "truncate": False}},
            RopeParameters(1e4, Yarn(4.0, 256.0, 1.5, 32.0, 1.0, False)),
        ),
        (
            {
                "rope_parameters": {"rope_type": "yarn", **YARN, "attention_factor": 2.0, "beta_fast": 16},
                "original_max_position_embeddings": 128,
            },
            RopeParameters(1e4, Yarn(4.0, 128.0, 2.0, 16.0, 1.0, True)),
        ),
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, changes: dict[str, Any], rope: RopeParameters) -> None:
    assert read_arch(folder(tmp_path, **changes)).rope == rope


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 512),
        ({"type": "linear", "factor": 2.0}, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_yarn_reaches_as_far_as_it_says(tmp_path: Path, rope: dict[str, Any] | None, length: int) -> None:
    """For the scheduler as for the verifier."""
    folder(tmp_path, rope_scaling=rope)
    assert read_arch(tmp_path).max_position == ModelFolder.read(tmp_path).max_model_len == length


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', supported are llama, qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', supported are llama, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is True, supported is false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": 3}, "layer_types has 3, supported is 'full_attention'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is of method 'gptq'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 does not divide into num_key_value_heads 3"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads is 'two'"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "does not divide"),
        ({"head_dim": -16}, "head_dim is -16"),
        ({"head_dim": 15}, "head_dim is 15, expected an even number"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type is 'dynamic', supported are default, linear"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "rope type is 'longrope'"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope type is ['yarn']"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "an object for 'full_attention'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None, expected a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor is inf, expected a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is None"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor is 4, expected more than low_freq_factor, 4",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "factor is None, expected a positive number"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": "no"}}, "truncate is 'no', expected true or false"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_slow": -1}}, "beta_slow is -1"),
        ({"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 1}, "rope_theta is 1"),
        ({"rope_scaling": {"type": "yarn", **YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, supported is 1"),
        ({"rope_theta": "big"}, "rope_theta is 'big', expected a positive number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a positive number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, expected a positive number, 1e-30 to 1e+30"),
        ({"rms_norm_eps": 10**400}, "expected a positive number, 1e-30 to 1e+30"),
        ({"rope_theta": 10**400}, "expected a positive number, 1e-30 to 1e+30"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-40}}, "factor is 1e-40, expected a positive number"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1e-308}}, "beta_fast is 1e-308, expected a positive"),
    ],
)
def test_unusable_configs(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_arch(folder(tmp_path, **changes))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ") and says in message and "\n" not in message


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"llama"', b"\xff\xfe\x00"])
def test_not_a_json_object(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointError) as caught:
        read_arch(tmp_path)
    assert str(path) in str(caught.value) and "JSON" in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_arch(tmp_path)
