"""From published tensors to the model that is trained, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kadence.errors import CheckpointError
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.model.weights import Checkpoint
from training import files
from training.model import DraftModel

_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def config(arch: DraftArch) -> dict[str, Any]:
    """config.json of the published format (draft-model contracts, section 1)."""
    a = arch
    dflash: dict[str, Any] = {
        "block_size": a.block_size,
        "target_layer_ids": list(a.taps),
        "mask_token_id": a.mask_token_id,
    }
    if a.conv_taps:
        dflash |= {"conv_kernel_size": a.conv_taps, "conv_group_size": a.conv_group}
    if a.selector_rank:
        dflash |= {"selector_rank": a.selector_rank, "selector_top_k": a.selector_top_k}
    return {
        "architectures": ["DFlash2DraftModel" if a.conv_taps or a.selector_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "is_causal": False,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": a.rms_norm_eps,
        "vocab_size": a.vocab_size,
        "max_position_embeddings": a.max_position,
        "rope_parameters": {"rope_theta": a.rope.theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "num_target_layers": a.num_target_layers,
        "layer_types": ["full_attention"] * a.num_layers,
        "dtype": "bfloat16",
        "dflash_config": dflash,
    }


def load(model: DraftModel, folder: Path, vocabulary: Tensor) -> list[str]:
    """Takes what a published drafter has of the model's tensors; returns the names of those it lacks.

    vocabulary int64 [v]: the ids whose rows of the codebooks are trained. Raises CheckpointError naming the file and
    what does not fit: a tensor's shape, or the layers and the mask token that its weights were trained with.
    """
    stored_arch = read_draft_arch(folder)
    for key, of_stored, of_model in (
        ("target_layer_ids", list(stored_arch.taps), list(model.arch.taps)),
        ("mask_token_id", stored_arch.mask_token_id, model.arch.mask_token_id),
    ):
        if of_stored != of_model:
            raise CheckpointError(f"{folder / 'config.json'}: {key} is {of_stored}, training is for {of_model}")
    state, missing = model.state_dict(), []
    with Checkpoint(folder) as checkpoint:
        stored = set(checkpoint.names())
        for name, tensor in state.items():
            if name not in stored:
                missing.append(name)
                continue
            shape = (model.arch.vocab_size, tensor.shape[1]) if name in _CODEBOOKS else tuple(tensor.shape)
            taken = checkpoint.take(name, shape, torch.float32)
            state[name] = taken[vocabulary] if name in _CODEBOOKS else taken
    model.load_state_dict(state)
    return missing


def load_target(model: DraftModel, folder: Path, names: list[str]) -> None:
    """Fills those of the tensors `names` that the target also has: from its last layers, and its last norm.

    Queries and keys stay random: the target's expect its own context, not the drafter's.
    """
    state, first = model.state_dict(), model.arch.num_target_layers - model.arch.num_layers
    with Checkpoint(folder) as checkpoint:
        stored = set(checkpoint.names())
        for name in names:
            parts = name.split(".")
            if parts[0] == "layers":
                parts[1] = str(first + int(parts[1]))
            source = "model." + ".".join(parts)
            if source in stored and not {"q_proj", "k_proj"} & set(parts):
                state[name] = checkpoint.take(source, tuple(state[name].shape), torch.float32)
    model.load_state_dict(state)


def save(model: DraftModel, folder: Path, vocabulary: Tensor, ranked: list[int]) -> None:
    """Writes the published format in bfloat16, and the ranking of ids beside it; a reader sees old or new files.
    ranked: all ids, most frequent first, of which `vocabulary` int64 [v] holds some; the codebooks' other rows are 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name in _CODEBOOKS:
            whole = torch.zeros(model.arch.vocab_size, tensor.shape[1])
            whole[vocabulary] = tensor.cpu()
            tensor = whole
        tensors[name] = tensor.to("cpu", torch.bfloat16).contiguous()
    files.replace(folder / "model.safetensors", lambda part: save_file(tensors, part, metadata={"format": "pt"}))
    settings, ranking = json.dumps(config(model.arch), indent=1), json.dumps({"token_ids": ranked})
    files.replace(folder / "config.json", lambda part: part.write_text(settings + "\n"))
    files.replace(folder / "draft_vocabulary.json", lambda part: part.write_text(ranking + "\n"))
