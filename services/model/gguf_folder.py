"""Writes a GGUF file as the folder that services read: safetensors, configuration, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kadence.errors import CheckpointError
from services.model import gguf_tokenizer, gguf_weights


def convert(source: Path, folder: Path) -> None:
    """Fills the existing, empty `folder` from the GGUF file `source`. On CheckpointError the folder is half full."""
    file = gguf_weights.open_gguf(source)
    cfg = gguf_weights.config(file)
    _write_json(folder / "config.json", cfg)
    _write_json(folder / "generation_config.json", _generation_config(file, cfg))
    _write_json(folder / "special_tokens_map.json", gguf_tokenizer.special_tokens(file))
    _write_json(folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(file))
    gguf_tokenizer.tokenizer(file).save(str(folder / "tokenizer.json"))
    shapes = gguf_weights.expected_shapes(cfg)
    write_bfloat16(folder / "model.safetensors", shapes, gguf_weights.tensors(file, cfg))


def write_bfloat16(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes a safetensors file of bfloat16 tensors, one at a time, so that memory holds only one of them.

    `shapes` names every tensor; `tensors` yields each of them once, float32, in any order.
    Raises CheckpointError naming the tensor that holds NaN or infinity.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        start = out.tell()
        for name, values in tensors:
            if not np.isfinite(values).all():
                raise CheckpointError(f"tensor {name} holds NaN or infinity")
            out.seek(start + header[name]["data_offsets"][0])
            out.write(gguf_weights.to_bfloat16(values))


def _generation_config(file: gguf_weights.GGUFFile, cfg: Mapping[str, Any]) -> dict[str, Any]:
    # Some models end a turn with another token than a text.
    ends = [cfg["eos_token_id"], file.metadata.get("tokenizer.ggml.eot_token_id")]
    ids = list(dict.fromkeys(index for index in ends if index is not None))
    return {
        "bos_token_id": cfg["bos_token_id"],
        "eos_token_id": ids if len(ids) > 1 else ids[0],
        "pad_token_id": cfg["pad_token_id"],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
