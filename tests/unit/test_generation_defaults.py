"""generation_config.json: what it makes of silent requests, and one clear line for nonsense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import CheckpointError
from services.scheduler.generation_defaults import GenerationDefaults
from services.scheduler.model_folder import ModelFolder

FILE = Path("folder/generation_config.json")


@pytest.mark.parametrize(
    ("config", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.6}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": None, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": True, "temperature": 0}, 0.0),
    ],
)
def test_greedy_unless_the_file_samples(config: dict[str, Any], temperature: float) -> None:
    assert GenerationDefaults.parse(config, FILE) == GenerationDefaults(temperature=temperature)


def test_as_a_published_model_has_it() -> None:
    """Qwen3's file, and the keys it does not have."""
    config = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.51.0",
    }
    assert GenerationDefaults.parse(config, FILE) == GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)
    more = {**config, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 2048}
    assert GenerationDefaults.parse(more, FILE) == GenerationDefaults(0.6, 0.95, 20, 0.1, 1.05, 2048)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"do_sample": "yes"}, "do_sample is 'yes'; true or false"),
        ({"do_sample": 1}, "do_sample is 1; true or false"),
        ({"temperature": -0.1}, "temperature is -0.1; 0 to 100"),
        ({"temperature": 101}, "temperature is 101; 0 to 100"),
        ({"temperature": float("nan")}, "temperature is nan; 0 to 100"),
        ({"temperature": True}, "temperature is True; 0 to 100"),
        ({"top_p": 0}, "top_p is 0; above 0, at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1; above 0, at most 1"),
        ({"top_k": -1}, "top_k is -1; an integer, 0 to 2147483647"),
        ({"top_k": 2.5}, "top_k is 2.5; an integer, 0 to 2147483647"),
        ({"top_k": 2**31}, "top_k is 2147483648; an integer, 0 to 2147483647"),
        ({"min_p": 2}, "min_p is 2; 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; 1e-30 to 1e30"),
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e+39; 1e-30 to 1e30"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf; 1e-30 to 1e30"),
        ({"repetition_penalty": "1.1"}, "repetition_penalty is '1.1'; 1e-30 to 1e30"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; an integer, at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens is True; an integer, at least 1"),
    ],
)
def test_nonsense_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        GenerationDefaults.parse(config, FILE)
    assert str(caught.value) == f"{FILE}: {says}"


def test_folder(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "copy"))
    assert ModelFolder.read(folder).defaults == GenerationDefaults()
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 1, "do_sample": True, "top_k": 40}))
    assert ModelFolder.read(folder).defaults == GenerationDefaults(temperature=1.0, top_k=40)
    file.write_text(json.dumps({"top_k": "x"}))
    with pytest.raises(CheckpointError, match=f"^{file}: top_k is 'x'; an integer, 0 to 2147483647$"):
        ModelFolder.read(folder)
    file.unlink()
    assert ModelFolder.read(folder).defaults == GenerationDefaults()
