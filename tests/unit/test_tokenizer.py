"""Prompts become ids as transformers would make them, and damaged model folders are named by file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kadence.errors import CheckpointError, InvalidRequestError
from services.scheduler.chat_template import ChatTemplate
from services.scheduler.model_folder import ModelFolder
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model

SMOLLM2 = Path(os.environ.get("KADENCE_HOME") or Path.home() / ".kadence") / "models/smollm2-135m-instruct"
CHAT = [("system", "Be brief."), ("user", "Hällo 日本語 🙂 <|im_end|>"), ("assistant", "Hi."), ("user", "  Bye\n")]


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "copy"))


@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not fetched")
def test_same_ids_as_transformers() -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(SMOLLM2), Tokenizer.load(SMOLLM2)
    for text in ("Hello, world 12345!", "  two\n\n lines\t", "日本語 🙂", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    messages = [{"role": role, "content": content} for role, content in CHAT]
    theirs_ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ours.encode_chat(CHAT) == theirs_ids


def test_folder(tokenizer_folder: Path) -> None:
    folder = ModelFolder.read(tokenizer_folder)
    assert (folder.vocab_size, folder.max_model_len) == (tiny_model.VOCAB_SIZE, tiny_model.CONTEXT)
    assert folder.eos_token_ids == (tiny_model.END,)
    assert folder.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_all_end_of_sequence_ids_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    assert ModelFolder.read(folder).eos_token_ids == (1, 3, 7)
    (folder / "generation_config.json").unlink()
    assert ModelFolder.read(folder).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, ["config.json", "missing"]),
        ("config.json", "{", ["config.json", "cannot be read"]),
        ("config.json", "[]", ["config.json", "not an object"]),
        ("config.json", '{"vocab_size": "x"}', ["config.json", "vocab_size", "'x'"]),
        ("config.json", '{"vocab_size": 9}', ["config.json", "max_position_embeddings", "None"]),
        ("generation_config.json", '{"eos_token_id": "x"}', ["generation_config.json", "eos_token_id", "'x'"]),
        ("generation_config.json", '{"eos_token_id": [1, 330]}', ["eos_token_id is [1, 330]", "from 0 to 329"]),
        ("generation_config.json", '{"eos_token_id": true}', ["eos_token_id is True"]),
        ("tokenizer.json", None, ["tokenizer.json", "missing"]),
        ("tokenizer.json", "{}", ["tokenizer.json", "cannot be read"]),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', ["chat_template", "compile"]),
    ],
)
def test_damage_is_named(folder: Path, file: str, content: str | None, words: list[str]) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(folder)
    assert all(word in str(caught.value) for word in words), caught.value


def test_no_chat_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequestError, match="no chat template; use prompt"):
        Tokenizer.load(folder).encode_chat([("user", "hi")])


def test_template_in_its_own_file_or_by_name(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y{{ messages[0]['content'] }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode_chat([("user", "hi")])) == "yhi"
    (folder / "chat_template.jinja").write_text("z{{ messages[0]['content'] }}")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode_chat([("user", "hi")])) == "zhi"


def test_templates_run_in_a_sandbox_and_may_refuse() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        refusing.render([("user", "hi")])
    assert caught.value.violations[0].field == "messages"
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([("user", "hi")])


def test_template_variables() -> None:
    text = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% if loop.first %}{% continue %}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(text, {"bos_token": "<s>"}).render([("user", "<é>")]) == '<s>{"role": "user", "content": "<é>"}'


def test_byte_limit_is_sound(tokenizer_folder: Path) -> None:
    """A text of `max_prompt_bytes` bytes can be as few tokens as the context holds; no longer one can."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    limit = tokenizer.max_prompt_bytes(10)
    for word in ("<|begin|>", " hello", "日", "the quick brown fox", "🙂"):
        text = word * 200
        while len(text.encode()) <= limit:
            text += word
        assert len(tokenizer.encode(text)) > 10
