"""What the scheduler reads of a model folder: sizes, ends of sequence, defaults, special tokens, chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError
from services.model.rope_parameters import context_length, read_rope
from services.scheduler.generation_defaults import GenerationDefaults

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face model folder without its weights."""

    path: Path
    vocab_size: int
    """Rows of the embedding; a tokenizer may know fewer ids."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    """Every id that config.json or generation_config.json names. The scheduler alone decides what ends an answer."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Text of bos_token, eos_token and so on, as chat templates want them."""
    chat_template: str | None = None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Reads the folder. Raises CheckpointError naming file and key."""
        config = _json(path / "config.json")
        generation = _json(path / "generation_config.json", required=False)
        tokenizer = _json(path / "tokenizer_config.json", required=False)
        vocab = _positive(config, "vocab_size", path)
        ends = {*_ids(config, "config.json", path, vocab), *_ids(generation, "generation_config.json", path, vocab)}
        return cls(
            path=path,
            vocab_size=vocab,
            max_model_len=_context(config, path),
            eos_token_ids=tuple(sorted(ends)),
            special_tokens={name: text for name in _SPECIAL if (text := _token(tokenizer.get(name)))},
            chat_template=_chat_template(path, tokenizer),
            defaults=GenerationDefaults.parse(generation, path / "generation_config.json"),
        )


def _json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds {type(data).__name__}, not an object")
    return data


def _positive(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path / 'config.json'}: {key} is {value!r}; a positive integer is needed")
    return value


def _context(config: dict[str, Any], path: Path) -> int:
    positions = _positive(config, "max_position_embeddings", path)
    return context_length(read_rope(config, path / "config.json"), positions)


def _ids(config: dict[str, Any], name: str, path: Path, vocab: int) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab for item in ids):
        raise CheckpointError(f"{path / name}: eos_token_id is {value!r}; ids from 0 to {vocab - 1} are needed")
    return ids


def _token(value: Any) -> str:
    """A token is written as its text, or as an object with its text in `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _chat_template(path: Path, tokenizer: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    value = tokenizer.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
