"""The drafter's own vocabulary: how it is ranked, how it is read, and what is told of a wrong file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kadence.errors import ConfigError
from services.drafter.draft_vocabulary import read_draft_vocabulary
from tests.support import tiny_model
from tests.support.tiny_llama import TinyLlama
from training import vocabulary


def test_the_most_frequent_ascending(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text('{"token_ids": [7, 2, 9, 0]}')
    assert read_draft_vocabulary(file, 3, 10).tolist() == [2, 7, 9]
    assert read_draft_vocabulary(file, 4, 10).tolist() == [0, 2, 7, 9]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read"),
        ("[1, 2]", "token_ids"),
        ('{"token_ids": 3}', "token_ids"),
        ('{"token_ids": [1, 10]}', "10"),
        ('{"token_ids": [1, -1]}', "-1"),
        ('{"token_ids": [1, true]}', "True"),
        ('{"token_ids": [1, 2.5]}', "2.5"),
        ('{"token_ids": [4, 3, 4]}', "4 more than once"),
        ('{"token_ids": [4]}', "2 token ids are wanted; it ranks 1"),
    ],
)
def test_wrong_files_are_told(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "v.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_draft_vocabulary(file, 2, 10)
    assert str(file) in str(error.value) and told in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.json: .*No such file.*python -m training\.vocabulary"):
        read_draft_vocabulary(tmp_path / "missing.json", 2, 10)


def test_ranking() -> None:
    responses = [[5, 5, 3, 9], [3, 5, 1]]
    assert vocabulary.rank(responses, 10, [8, 9]) == [8, 9, 5, 3, 1, 0, 2, 4, 6, 7]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data, out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "out.json"
    model.mkdir()
    TinyLlama(model)
    lines = [
        {"prompt_ids": [200, 200, 200], "response_ids": [40, 41, 41], "temperature": 0},
        {"prompt_ids": [201], "response_ids": [41, 40, 41]},
        {"job": 3, "task": "chat"},
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--data", str(data), "--model", str(model), "--out", str(out)]
    assert vocabulary.main(arguments) == 0
    ranked = json.loads(out.read_text())["token_ids"]
    assert ranked[:4] == [tiny_model.END, 41, 40, 0]
    assert sorted(ranked) == list(range(tiny_model.VOCAB_SIZE))
    assert read_draft_vocabulary(out, 3, tiny_model.VOCAB_SIZE).tolist() == [1, 40, 41]
    data.write_text('{"job": 3, "task": "chat"}')
    assert vocabulary.main(arguments) == 1
    assert capsys.readouterr().err == f"error: {data}: no answers of two tokens there\n"
    for line in ("not json", '{"response_ids": [330]}', "[]"):
        data.write_text(f'{{"response_ids": []}}\n{line}\n')
        assert vocabulary.main(arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {data}:2: ") and error.count("\n") == 1


def test_an_id_twice_at_the_end_of_a_long_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text(json.dumps({"token_ids": [*range(150_000), 149_999]}))
    began = time.process_time()
    with pytest.raises(ConfigError, match="149999 more than once"):
        read_draft_vocabulary(file, 2, 151_936)
    assert time.process_time() - began < 5  # comparing each with each takes minutes
