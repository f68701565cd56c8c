"""Conversations made: the target's own answers, the same file whatever happens on the way, and errors in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kadence import ConflictError, InvalidRequestError
from kadence.cluster import LLM
from services.scheduler.tokenizer import Tokenizer
from tests.support import tiny_model
from tests.support.tiny_drafter import TARGET_LAYERS, write_drafter
from tests.support.tiny_llama import TinyLlama
from training import data
from training.conversations import LONGEST
from training.jobs import Job, plan

Make = Callable[..., tuple[int, list[str]]]
PROMPTS = ["hello world", "the quick brown fox", "stop here", "fox " * 300]


def job(**more: Any) -> Job:
    fields = {"number": 5, "task": "chat", "prompt": "hello big world", "whole": True, "words": 0, "lead": 0}
    return Job(**{**fields, "temperature": 0.0, "seed": 9, **more})


class FakeLLM:
    """Answers calls with what `answer` says, a list of ids and a finish reason, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.calls: list[tuple[list[int], int, float, int]] = []

    def generate(self, ids: list[int], *, max_tokens: int, temperature: float, seed: int) -> list[Any]:
        self.calls.append((ids, max_tokens, temperature, seed))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids, reason, *text = answer
        return [SimpleNamespace(token_ids=tuple(ids), finish_reason=reason, text="".join(text))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    return TinyLlama(tmp_path_factory.mktemp("data") / "model", num_hidden_layers=TARGET_LAYERS)


@pytest.fixture(scope="module")
def make(llama: TinyLlama) -> Make:
    """Runs the command on PROMPTS: its exit status and the file's lines."""
    folder = llama.folder.parent
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"task": "chat", "prompt": p}) for p in PROMPTS))

    def run(out: Path, *more: str) -> tuple[int, list[str]]:
        fixed = ["--prompts", str(folder), "--model", str(llama.folder), "--out", str(out), "--max-tokens", "24"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data, "LLM", partial(LLM, dtype="float32"))  # where what runs beside an answer hardly matters
            code = data.main([*fixed, "--answers", "2", "--turns", "4", "--threads", "1", *more])
        return code, out.read_text().splitlines(keepends=True) if out.exists() else []

    return run


def test_answers_are_the_targets_own(make: Make, llama: TinyLlama, tmp_path: Path) -> None:
    """Compared with what transformers generates after prompt and lead."""
    code, written = make(tmp_path / "out.jsonl", "--at-once", "4", "--seed", "3")
    assert code == 0
    lines = [json.loads(line) for line in written]
    jobs = plan([("chat", prompt) for prompt in PROMPTS], 2, 4, 0.0, 3)
    assert [(line["job"], line["task"]) for line in lines] == [(job.number, job.label) for job in jobs]
    tokenizer, leads = Tokenizer.load(llama.folder), set()
    for line, made in zip(lines, jobs, strict=True):
        if made.prompt == PROMPTS[3] and made.whole:
            assert set(line) == {"job", "task"}  # longer than what training looks at
        elif "response_ids" in line:
            prompt, response, lead = line["prompt_ids"], line["response_ids"], line["lead"]
            if made.whole:
                assert prompt == tokenizer.encode_chat([("user", made.prompt)])
                assert lead == min(made.lead, 23) or response[-1] == tiny_model.END
            rest = llama.generate(prompt + response[:lead], 24 - lead, [tiny_model.END])
            llama.assert_same(prompt + response[:lead], response[lead:], rest if response[lead:] else [])
            assert len(response) == 24 or response[-1] == tiny_model.END
            leads.add(lead)
    assert 0 in leads and len(leads) > 2


def test_the_file_is_the_same_whatever_happens(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run; one in two shards; one that was killed within a line, and goes on with a drafter and fewer at once."""
    code, whole = make(tmp_path / "whole.jsonl", "--seed", "3", "--temperature", "0.7")
    assert code == 0 and len(whole) == 12
    assert "12 of 12, " in capsys.readouterr().out
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(whole[:5]) + whole[5][:-20])
    drafter = write_drafter(tmp_path / "drafter")
    speculating = ["--drafter", str(drafter), "--policy", "fixed:3", "--at-once", "2"]
    assert make(cut, "--seed", "3", "--temperature", "0.7", *speculating) == (0, whole)
    assert "7 of 7, " in capsys.readouterr().out
    assert make(cut, "--seed", "3", "--temperature", "0.7") == (0, whole)
    assert capsys.readouterr().out == f"{cut} is complete\n"
    assert make(tmp_path / "odd.jsonl", "--seed", "3", "--temperature", "0.7", "--shard", "1/2") == (0, whole[1::2])


def test_a_turn_is_written_by_the_target(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    llm = FakeLLM(([1, 2], "stop", " there"), ([40, 41, 1], "stop"))
    line = data.Writer(llm, tokenizer, 24).line(job(whole=False, words=2))  # type: ignore[arg-type]
    began, room, temperature, seed = llm.calls[0]
    assert tokenizer.token_text(began[0]) + tokenizer.decode(began[1:]) == "<|begin|>user\nhello big"
    assert (room, temperature, seed) == (96, 1.0, 9)
    prompt = tokenizer.encode_chat([("user", "hello big there")])
    assert llm.calls[1] == (prompt, 24, 0.0, 10)
    answer = {"prompt_ids": prompt, "response_ids": [40, 41, 1], "lead": 0, "temperature": 0.0}
    assert line == {"job": 5, "task": "chat-like", **answer}


def test_turns_without_end_or_text_give_no_answer(tokenizer_folder: Path) -> None:
    for turn in (([40] * 96, "length", "and so on"), ([1], "stop", " \n")):
        llm = FakeLLM(turn)
        writer = data.Writer(llm, Tokenizer.load(tokenizer_folder), 24)  # type: ignore[arg-type]
        assert writer.line(job(whole=False)) == {"job": 5, "task": "chat-like"}


def test_leads(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    prompt = tokenizer.encode_chat([("user", "hello big world")])
    llm = FakeLLM(([40, 41], "length"), ([42, 43], "length"), ([40, 1], "stop"))
    writer = data.Writer(llm, tokenizer, 24)  # type: ignore[arg-type]
    line = writer.line(job(lead=2, temperature=0.5))
    assert (line["lead"], line["response_ids"], line["temperature"]) == (2, [40, 41, 42, 43], 0.5)
    assert llm.calls == [(prompt, 2, 1.0, 9), ([*prompt, 40, 41], 22, 0.5, 10)]
    line = writer.line(job(lead=40))
    assert (line["lead"], line["response_ids"]) == (2, [40, 1])
    assert llm.calls[2:] == [(prompt, 23, 1.0, 9)]


def test_prompt_and_answer_fit_together(tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    base = len(tokenizer.encode_chat([("user", "")]))
    for length, room in ((LONGEST - base - 2, 2), (LONGEST - base - 1, 0)):
        llm = FakeLLM(([40, 41], "length"))
        prompt = "§" * (length // 2) + "." * (length % 2)  # two tokens each
        line = data.Writer(llm, tokenizer, 24).line(job(prompt=prompt))  # type: ignore[arg-type]
        assert [call[1] for call in llm.calls] == ([room] if room else [])
        assert ("response_ids" in line) == bool(room)


def test_answers_that_the_cluster_lost_are_asked_for_again(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    tokenizer, lost = Tokenizer.load(tokenizer_folder), ConflictError("gone")
    llm = FakeLLM(lost, lost, ([40, 41], "length"), lost, lost, lost, InvalidRequestError("no"))
    writer = data.Writer(llm, tokenizer, 24)  # type: ignore[arg-type]
    assert writer.line(job())["response_ids"] == [40, 41]
    assert llm.calls[0] == llm.calls[1] == llm.calls[2]
    with pytest.raises(ConflictError):
        writer.line(job())
    with pytest.raises(InvalidRequestError):
        writer.line(job())
    assert len(llm.calls) == 7


def test_lines_come_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    jobs = [job(number=number) for number in range(8)]

    def line(job: Job) -> dict[str, Any]:
        time.sleep(0.2 if job.number == 0 else 0)
        return {"job": job.number}

    with (tmp_path / "out.jsonl").open("w") as out:
        data.write(jobs, line, out, 4)
    assert (tmp_path / "out.jsonl").read_text() == "".join(f'{{"job":{number}}}\n' for number in range(8))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--answers", "-1"], "--answers is -1; at least 0 is needed"),
        (["--temperature", "nan"], "--temperature is nan; 0 to 100 is needed"),
        (["--max-tokens", "1"], "--max-tokens is 1; 2 to 512 is needed"),
        (["--at-once", "0"], "--at-once is 0; 1 to 4096 is needed"),
        (["--shard", "2/2"], "--shard is '2/2'; i/n is needed, i from 0 to n - 1"),
        (["--model", "none-such"], "none-such: no such folder"),
        (["--prompts", "none.jsonl"], "none.jsonl: cannot be read: No such file"),
        (["--drafter", "none-such"], "none-such"),
    ],
)
def test_errors_are_one_line(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], told: str
) -> None:
    out = tmp_path / "out.jsonl"
    assert make(out, *more) == (1, [])
    error = capsys.readouterr().err
    assert error.startswith("error: ") and told in error and error.count("\n") == 1
    assert not out.exists()
