"""config.json: what is read out of it, and one clear line for everything that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import CheckpointError
from services.model.arch import read_arch

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


def folder(path: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Writes a folder; a change to None removes the key."""
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_reads_all_sizes(tmp_path: Path) -> None:
    arch = read_arch(folder(tmp_path, rope_theta=5e5, dtype="bfloat16", tie_word_embeddings=True))
    assert (arch.family, arch.hidden_size, arch.intermediate_size, arch.num_layers) == ("llama", 64, 96, 2)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.group) == (4, 2, 16, 2)
    assert (arch.vocab_size, arch.max_position) == (330, 512)
    assert (arch.rope_theta, arch.rms_norm_eps, arch.tied_head, arch.config_dtype) == (5e5, 1e-5, True, "bfloat16")
    # K and V of two layers, two KV heads, 16 numbers of two bytes.
    assert arch.kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


def test_defaults(tmp_path: Path) -> None:
    arch = read_arch(folder(tmp_path, num_key_value_heads=None, rms_norm_eps=None, eos_token_id=None))
    assert (arch.num_kv_heads, arch.rms_norm_eps, arch.tied_head) == (4, 1e-6, False)
    assert (arch.rope_theta, arch.eos_ids, arch.config_dtype) == (10000.0, (), "float32")


def test_head_dim_may_differ_from_hidden_over_heads(tmp_path: Path) -> None:
    assert read_arch(folder(tmp_path, head_dim=32)).head_dim == 32
    assert read_arch(folder(tmp_path, head_dim=32, hidden_size=50)).hidden_size == 50


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 1e5),
        ({"rope_scaling": None, "rope_theta": 2e4}, 2e4),
        ({"rope_scaling": {"type": "default"}, "rope_theta": 3e4}, 3e4),
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, changes: dict[str, Any], theta: float) -> None:
    assert read_arch(folder(tmp_path, **changes)).rope_theta == theta


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {}, (2,)),
        (None, {"eos_token_id": 9}, (9,)),
        (2, {"eos_token_id": None}, (2,)),
    ],
)
def test_ends_of_sequence(tmp_path: Path, config: Any, generation: dict[str, Any] | None, ids: tuple[int, ...]) -> None:
    assert read_arch(folder(tmp_path, generation, eos_token_id=config)).eos_ids == ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', supported are llama"),
        ({"model_type": None}, "model_type is None"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
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
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope type 'llama3' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope type 'yarn'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_theta": "big"}, "rope_theta is 'big', expected a positive number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected ids"),
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


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_arch(tmp_path)
    (folder(tmp_path) / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: not readable as JSON"):
        read_arch(tmp_path)
