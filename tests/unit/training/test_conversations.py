"""Conversations: where an answer begins to loop, what is read of files, and what is told of wrong ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kadence.errors import ConfigError
from training.conversations import Conversation, before_loop, read, read_prompts, spread


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ((1, 2, 3, 4, 1, 2, 3, 5), 7),
        ((7, 7, 7, 7, 7), 4),  # grams may overlap
        ((1, 2, 3, 1, 2), 5),
        ((1, 2), 2),
        ((), 0),
    ],
)
def test_an_answer_is_kept_to_the_end_of_the_first_gram_that_comes_again(ids: tuple[int, ...], kept: int) -> None:
    assert before_loop(ids, 3) == kept


def test_loops_are_where_text_search_finds_them() -> None:
    """As letters: the shortest beginning whose last grams also stand further left."""
    draw = random.Random(0)
    loops = 0
    for _ in range(200):
        text = "".join(draw.choice("abc") for _ in range(draw.randint(0, 40)))
        ends = [end for end in range(4, len(text) + 1) if text.find(text[end - 4 : end]) < end - 4]
        assert before_loop(tuple(map(ord, text)), 4) == min(ends, default=len(text))
        loops += bool(ends)
    assert 50 < loops < 200


def test_each_conversation_once_cut_and_in_order(tmp_path: Path) -> None:
    loop = [*range(16)] * 4
    one = written(
        tmp_path / "one.jsonl",
        {"prompt_ids": [1, 2], "response_ids": [3, 4], "note": "a\u2028b\x85c"},  # lines to splitlines(), not to JSON
        {"job": 4, "task": "chat"},
        {"prompt_ids": [1], "response_ids": [3]},
        {"prompt_ids": [], "response_ids": [3, 4]},
        {"prompt_ids": [9], "response_ids": loop},
        {"prompt_ids": [*range(39)], "response_ids": [3, 4]},
        {"prompt_ids": [*range(38)], "response_ids": [3, 4, 5]},
    )
    two = written(tmp_path / "two.jsonl", {"prompt_ids": [1, 2], "response_ids": [3, 4]}, {"prompt_ids": [1, 2, 3]})
    two.write_text(two.read_text() + '\n{"prompt_ids": [5], "response_ids": [6, 7]}')
    assert read([one, two], 50, 40) == [
        Conversation((1, 2), (3, 4)),
        Conversation((9,), (*range(16), *range(16))),
        Conversation((*range(38),), (3, 4)),
        Conversation((5,), (6, 7)),
    ]


def test_a_digest_tells_prompt_from_answer() -> None:
    named = {Conversation(*parts).digest for parts in (((1, 2), (3,)), ((1,), (2, 3)), ((12,), (3,)))}
    assert len(named) == 3 and all(len(digest) == 16 for digest in named)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not JSON"),
        ("[1]", r"\[1\]; an object"),
        ('{"prompt_ids": 3}', "prompt_ids is 3; a list"),
        ('{"prompt_ids": [1], "response_ids": [1, 50]}', "response_ids holds 50; ids from 0 to 49"),
        ('{"prompt_ids": [-1]}', "prompt_ids holds -1"),
        ('{"prompt_ids": [true]}', "prompt_ids holds True"),
        ('{"prompt_ids": [1.0]}', r"prompt_ids holds 1\.0"),
    ],
)
def test_wrong_lines_are_told(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{{}}\n{line}\n")
    with pytest.raises(ConfigError, match=rf"data\.jsonl:2: {told}"):
        read([path], 50)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read: No such file"):
        read([tmp_path / "none.jsonl"], 50)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match=r"bytes\.jsonl: cannot be read: not a text file"):
        read([tmp_path / "bytes.jsonl"], 50)
    short = written(tmp_path / "short.jsonl", {"prompt_ids": [1], "response_ids": [3]})
    with pytest.raises(ConfigError, match=r"short\.jsonl: no answers of two tokens there"):
        read([short], 50)


def test_prompts_of_files_and_folders(tmp_path: Path) -> None:
    code = written(tmp_path / "code.jsonl", {"task": "code", "prompt": "c\u2028d"})
    written(tmp_path / "art.jsonl", {"task": "art", "prompt": "a"}, {"task": "art", "prompt": "b", "more": 1})
    (tmp_path / "notes.txt").write_text("no prompts")
    everything = [("art", "a"), ("art", "b"), ("code", "c\u2028d")]
    assert read_prompts([tmp_path]) == everything
    assert read_prompts([code, tmp_path]) == [everything[2], *everything]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"task": "code"}, "prompt is None"),
        ({"prompt": "a"}, "task is None"),
        ({"task": "code", "prompt": ""}, "is ''"),
    ],
)
def test_wrong_prompts_are_told(tmp_path: Path, line: object, told: str) -> None:
    path = written(tmp_path / "p.jsonl", {"task": "code", "prompt": "a"}, line)
    with pytest.raises(ConfigError, match=rf"p\.jsonl:2: .*{told}"):
        read_prompts([path])


def test_no_prompts_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts there"):
        read_prompts([tmp_path])


def test_prompts_are_spread_over_all() -> None:
    prompts = [str(number) for number in range(10)]
    assert spread(prompts, 4) == ["0", "2", "5", "7"]
    assert spread(prompts, 10) == spread(prompts, 99) == prompts
    assert spread(prompts, 1) == ["0"] and spread([], 3) == []
