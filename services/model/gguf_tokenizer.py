"""The tokenizer inside a GGUF file as the files of a Hugging Face folder (tokenizers, no transformers)."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kadence.errors import CheckpointError
from services.model.gguf_weights import GGUFFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer(file: GGUFFile) -> Tokenizer:
    """The byte-level BPE tokenizer. Raises CheckpointError for any other kind of vocabulary."""
    kind, split = file.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise CheckpointError(
            f"{file.path}: tokenizer is model {kind!r} with split {split!r}, only 'gpt2' with 'smollm' can be converted"
        )
    tokens = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    try:
        result = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # tokenizers raises plain Exception, for one when a merge names a token that is not in the vocabulary.
    except Exception as error:
        raise CheckpointError(f"{file.path}: the tokenizer cannot be built ({error})") from error
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    result.post_processor = processors.ByteLevel(trim_offsets=False)
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    for token, token_kind in zip(tokens, kinds, strict=True):
        if token_kind == _CONTROL:
            result.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_kind == _USER_DEFINED:
            result.add_tokens([AddedToken(token, special=False, normalized=False)])
    return result


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """The special_tokens_map.json: role to token text, of the roles the file names."""
    tokens = file.get("tokenizer.ggml.tokens")
    found = {}
    for role, key in _ROLES.items():
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            found[role] = tokens[index]
    return found


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """The tokenizer_config.json, chat template included where the file has one."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.get("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **special_tokens(file),
    }
    if template := file.metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
