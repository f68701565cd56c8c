"""Text to ids and back, and conversations to ids; without torch and without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from kadence.errors import CheckpointError, InvalidRequestError
from services.scheduler.chat_template import ChatTemplate
from services.scheduler.detokenizer import Detokenizer
from services.scheduler.model_folder import ModelFolder
from services.scheduler.token_bytes import TokenBytes

# A context of a million tokens would allow prompts that nobody means to send.
_MAX_PROMPT_BYTES = 8 * 1024 * 1024


class Tokenizer:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, folder: ModelFolder) -> None:
        file = folder.path / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the binding raises bare Exceptions
            reason = "missing" if not file.exists() else f"cannot be read: {error}"
            raise CheckpointError(f"{file}: {reason}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        self._bytes = TokenBytes(self._tokenizer)
        template = folder.chat_template
        self._template = ChatTemplate(template, folder.special_tokens, str(folder.path)) if template else None

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer of the folder at `path`. Raises CheckpointError naming the file."""
        return cls(ModelFolder.read(path))

    def max_prompt_bytes(self, max_model_len: int) -> int:
        """No longer text fits into that many tokens."""
        return min(_MAX_PROMPT_BYTES, max_model_len * self._longest)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the leading token the tokenizer itself adds, if any. Releases the GIL."""
        return self._tokenizer.encode_batch_fast([text])[0].ids

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Ids of each text alone, without any leading token. Releases the GIL."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(words), add_special_tokens=False)]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of the rendered conversation. Raises InvalidRequestError if the template is missing or refuses it."""
        if self._template is None:
            raise InvalidRequestError.of("messages", "the model has no chat template; use prompt")
        text = self._template.render(messages)
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: list[int]) -> str:
        """Text of `ids` without special tokens."""
        return self._tokenizer.decode(ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token, also of a special one."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token, which may be a part of a character; of a special token those of its name."""
        return self._bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves it out."""
        return self._bytes.special(token_id)

    def detokenizer(self) -> Detokenizer:
        """A new one, for one answer."""
        return Detokenizer(self._tokenizer.decode)
