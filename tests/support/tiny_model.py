"""A model folder without weights: a byte-level BPE tokenizer of 320 ids, a chat template, sizes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 330  # more rows than the tokenizer has ids, as real models have
CONTEXT = 256
BEGIN, END = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\\n' }}{% endif %}"
)
_TEXT = ["hello world, the quick brown fox jumps over the lazy dog", "stop here and there. äöü 日本語 🙂🙃"]


def write(path: Path, **config: object) -> None:
    """Writes the folder's files; `config` overrides keys of config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=318,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT, "eos_token_id": END, **config}
    files = {
        "config.json": sizes,
        "generation_config.json": {"eos_token_id": [END]},
        "tokenizer_config.json": {
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|end|>"},
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
