"""A GGUF file becomes a Hugging Face folder: weights, rounding, configuration, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kadence.errors import CheckpointError
from services.model import gguf_folder, gguf_weights
from services.scheduler.generation_defaults import GenerationDefaults
from services.scheduler.model_folder import ModelFolder
from tests.support.tiny_gguf import TinyModel


def convert(model: TinyModel, tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_folder.convert(model.write(tmp_path / "tiny.gguf"), folder)
    return folder


def rotate(vector: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
    """Rotary embedding of one head's vector, by its definition, pairs side by side or in two halves."""
    half = len(vector) // 2
    out = np.empty_like(vector)
    for index in range(half):
        first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + half)
        angle = position * 10000.0 ** (-index / half)
        out[first] = vector[first] * np.cos(angle) - vector[second] * np.sin(angle)
        out[second] = vector[first] * np.sin(angle) + vector[second] * np.cos(angle)
    return out


def test_unpermuted_rows_score_as_the_files_own_rotation_does() -> None:
    """Attention scores from the file's rows, rotated its way, equal those from our rows, rotated Hugging Face's way."""
    noise = np.random.default_rng(1)
    heads, size, hidden = 3, 8, 5
    wq, wk = noise.standard_normal((2, heads * size, hidden))
    x, y = noise.standard_normal((2, hidden))
    ours_q, ours_k = (gguf_weights.unpermute(w, heads) for w in (wq, wk))
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        file_score = rotate((wq @ x)[rows], 5, True) @ rotate((wk @ y)[rows], 2, True)
        our_score = rotate((ours_q @ x)[rows], 5, False) @ rotate((ours_k @ y)[rows], 2, False)
        wrong_score = rotate((wq @ x)[rows], 5, False) @ rotate((wk @ y)[rows], 2, False)
        assert our_score == pytest.approx(file_score)
        assert wrong_score != pytest.approx(file_score)


def test_rounding_is_to_nearest_even() -> None:
    values = np.random.default_rng(2).standard_normal(10_000).astype(np.float32) * 10
    ties = (np.arange(1000, dtype=np.uint32) << 16 | 0x3F808000).view(np.float32)
    values = np.concatenate([values, ties, np.array([0.0, -0.0, 1e-45, 3e38], np.float32)])
    ours = torch.frombuffer(bytearray(gguf_weights.to_bfloat16(values)), dtype=torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_model(tied: bool, tmp_path: Path) -> None:
    model = TinyModel(tied=tied)
    folder = convert(model, tmp_path)
    found = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in found) == (not tied)
    assert len(found) == len(model.tensors)
    names = {
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.embed_tokens.weight": "token_embd.weight",
    }
    for name, source in names.items():
        assert torch.equal(found[name], torch.from_numpy(model.tensors[source]).to(torch.bfloat16)), name


def test_transformers_reads_the_folder_as_it_reads_the_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = convert(TinyModel(), tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    assert ours.dtype == torch.bfloat16 and ours.config.tie_word_embeddings
    assert ours.config.rope_parameters == theirs.config.rope_parameters
    expected = {name: values.to(torch.bfloat16) for name, values in theirs.state_dict().items()}
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert ours.generation_config.eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # "\n 12": a digit always stands alone, so the white space before it is one piece.
    ids = tokenizer("<|im_start|>hello w\n 12 é<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<|im_start|>", "he", "ll", "o", "Ġw", "ĊĠ", "1", "2", "Ġ", "Ã", "©", "<|im_end|>")
    ]
    assert tokenizer.decode(ids) == "<|im_start|>hello w\n 12 é<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello w\n 12 é"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_configuration(tmp_path: Path) -> None:
    folder = convert(TinyModel(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 64,
    }
    assert config.items() >= wanted.items()
    roles = json.loads((folder / "special_tokens_map.json").read_text())
    assert roles["bos_token"] == "<|im_start|>" and roles["eos_token"] == roles["pad_token"] == "<|im_end|>"


def test_greedy_is_the_default(tmp_path: Path) -> None:
    """For us as for transformers."""
    from transformers import GenerationConfig

    folder = convert(TinyModel(), tmp_path)
    assert ModelFolder.read(folder).defaults == GenerationDefaults()
    assert not GenerationConfig.from_pretrained(folder).do_sample


def broken(change: str) -> TinyModel:
    model = TinyModel(architecture="gemma" if change == "architecture" else "llama")
    match change:
        case "missing":
            del model.tensors["blk.1.ffn_up.weight"]
        case "shape":
            model.tensors["blk.0.attn_v.weight"] = model.tensors["blk.0.attn_v.weight"][:-1]
        case "unknown":
            model.tensors["rope_freqs.weight"] = np.ones(2, np.float32)
        case "surplus":
            model.tensors["blk.2.ffn_up.weight"] = model.tensors["blk.1.ffn_up.weight"]
        case "nan":
            model.tensors["output_norm.weight"][3] = np.nan
        case "split":
            model.split = "qwen2"
        case "rope":
            model.rope_scaling = "yarn"
    return model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("architecture", "general.architecture"),
        ("missing", "model.layers.1.mlp.up_proj.weight is missing"),
        ("shape", "blk.0.attn_v.weight has shape (7, 16), expected (8, 16)"),
        ("unknown", "rope_freqs.weight"),
        ("surplus", "blk.2.ffn_up.weight"),
        ("nan", "model.norm.weight holds NaN"),
        ("split", "qwen2"),
        ("rope", "llama.rope.scaling.type is 'yarn', only 'none' can be converted"),
    ],
)
def test_wrong_files_name_what_is_wrong(change: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert(broken(change), tmp_path)
    assert named in str(caught.value) and "\n" not in str(caught.value)
