"""kadence.cluster.LLM: answers in order and exact, errors in one line, and nothing left when it is closed."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kadence import (
    CheckpointError,
    Client,
    ConfigError,
    InvalidRequestError,
    Message,
    ReplicaStatus,
    RequestCancelledError,
)
from kadence.cluster import LLM
from tests.shape.source_tree import ROOT
from tests.support.tiny_llama import TinyLlama

PROMPTS = [[5, 6, 7], [9, 9, 9, 9], [40, 41, 42, 40, 41, 42, 40]]


@pytest.fixture(scope="module")
def llm(tiny_llama: TinyLlama) -> Iterator[LLM]:
    with LLM(str(tiny_llama.folder), dtype="float32", verifier={"kv_tokens": 8192}) as llm:
        yield llm


def verifier(llm: LLM) -> ReplicaStatus:
    with Client(llm.endpoint) as client:
        return next(replica for replica in client.status().replicas if replica.kind == "verifier")


def until_idle(llm: LLM) -> None:
    """Waits until the verifier reports that it holds nothing."""
    pause = threading.Event()
    for _ in range(200):
        replica = verifier(llm)
        if not replica.running and not replica.waiting and not replica.kv_pages_used:
            return
        pause.wait(0.05)
    raise AssertionError(f"not idle: {replica}")


@pytest.mark.parametrize("k", [0, 7])
def test_answers_are_the_reference_models(llm: LLM, tiny_llama: TinyLlama, k: int) -> None:
    results = llm.generate(PROMPTS, max_tokens=40, ignore_eos=True, max_draft_tokens=k)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.prompt_token_ids) == prompt
        tiny_llama.assert_same(prompt, list(result.token_ids), tiny_llama.generate(prompt, 40))
    assert (sum(result.stats.accepted for result in results) > 0) == (k > 0)
    until_idle(llm)


def test_sampled_answers_do_not_depend_on_drafts(llm: LLM) -> None:
    seeds = [{"seed": seed} for seed in range(3)]
    plain, drafted = (
        llm.generate(PROMPTS, seeds, temperature=0.8, top_p=0.9, max_tokens=30, ignore_eos=True, max_draft_tokens=k)
        for k in (0, 7)
    )
    assert [r.token_ids for r in plain] == [r.token_ids for r in drafted]
    assert [r.seed for r in plain] == [0, 1, 2]
    assert len({r.token_ids for r in plain}) == 3


def test_a_text_a_list_ids_and_options_for_each(llm: LLM) -> None:
    (one,) = llm.generate("hello", max_tokens=3, ignore_eos=True)
    (same,) = llm.generate(one.prompt_token_ids, max_tokens=3, ignore_eos=True)
    assert same.token_ids == one.token_ids
    short, long = llm.generate(["hello", "hello"], [{}, {"max_tokens": 3}], max_tokens=2, ignore_eos=True)
    assert long.token_ids == one.token_ids and short.token_ids == one.token_ids[:2]
    assert llm.generate([]) == []


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, max_tokens=2)
    both = llm.chat([conversation, [Message("user", "hi")]], max_tokens=2)
    assert [r.token_ids for r in both] == [one.token_ids] * 2


def test_a_stream(llm: LLM) -> None:
    with llm.stream("hello", max_tokens=9, ignore_eos=True) as stream:
        ids = [token for chunk in stream for token in chunk.token_ids]
    assert tuple(ids) == stream.result.token_ids == llm.generate("hello", max_tokens=9, ignore_eos=True)[0].token_ids
    with llm.stream("hello", max_tokens=4000, ignore_eos=True) as stream:
        assert next(stream).token_ids
    with pytest.raises(RequestCancelledError):
        list(stream)
    until_idle(llm)


async def test_in_a_running_event_loop(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert len(llm.generate("hello", max_tokens=2, ignore_eos=True)[0].token_ids) == 2


def test_one_that_fails_ends_the_others(llm: LLM) -> None:
    wrong = [{}, {"max_tokens": 10**9}, {}]
    with pytest.raises(InvalidRequestError, match="1000000000") as error:
        llm.generate(PROMPTS, wrong, max_tokens=4000, ignore_eos=True)
    assert error.value.violations[0].field == "sampling.max_tokens"
    until_idle(llm)
    with pytest.raises(InvalidRequestError, match="per_prompt: 1 options for 3 prompts"):
        llm.generate(PROMPTS, [{}])
    with pytest.raises(TypeError, match="max_token"):
        llm.generate("hello", max_token=3)  # type: ignore[call-arg]


def test_what_is_no_list_is_named(llm: LLM) -> None:
    either = "a text, a list of token ids, or a list of either"
    for prompts, shown in ((5, "5"), (None, "None"), ({"a": 1}, "{'a': 1}")):
        with pytest.raises(InvalidRequestError, match=re.escape(f"prompts: {shown}; {either}")):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="conversations: 'hi'; a list of messages"):
        llm.chat("hi")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=re.escape("per_prompt: {'n': 2}; a list of options")):
        llm.generate("hello", {"n": 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=re.escape("per_prompt[0]: None; options by name")):
        llm.generate("hello", [None])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "says", "kind"),
    [
        ({"model": "no-such-model"}, "no-such-model: no such folder", CheckpointError),
        ({"drafter": "oracle"}, '[drafter] kind = "oracle"', ConfigError),
        ({"drafter": ["ngram", "dflash2"]}, "one drafter kind", ConfigError),
        ({"policy": "best"}, '[policy] name = "best"', ConfigError),
        ({"verifier": {"page_sise": 1}}, 'unknown key page_sise; did you mean "page_size"?', ConfigError),
        ({"kv_tokens": 64}, "kv_tokens: unknown section", ConfigError),
        ({"verifier": {"kv_tokens": 64, "max_model_len": 100}}, "max_model_len = 100", ConfigError),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    tiny_llama: TinyLlama, arguments: dict[str, object], says: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as error:
        LLM(**{"model": str(tiny_llama.folder), **arguments})  # type: ignore[arg-type]
    assert says in str(error.value) and "\n" not in str(error.value)


def test_closing_ends_what_runs(tiny_llama: TinyLlama) -> None:
    llm = LLM(str(tiny_llama.folder))
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate(["hello"] * 4, max_tokens=4000, ignore_eos=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    pause = threading.Event()
    while not verifier(llm).running:
        pause.wait(0.02)
    llm.close()
    thread.join(30)
    assert [type(error) for error in errors] == [RequestCancelledError]
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("hello")
    host, _, port = llm.endpoint.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_several_one_after_the_other_leave_no_thread_and_no_port(tiny_llama: TinyLlama) -> None:
    done = python(
        """
        import gc, sys, threading
        import psutil
        from kadence.cluster import LLM
        for _ in range(3):
            llm = LLM(sys.argv[1])
            print(llm.generate("hello", max_tokens=4, ignore_eos=True)[0].token_ids)
            llm.close()
        del llm
        gc.collect()  # gRPC's own thread ends with its last object
        print([t.name for t in threading.enumerate()], psutil.Process().net_connections("inet"))
        """,
        str(tiny_llama.folder),
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    *answers, left = done.stdout.splitlines()
    assert len(answers) == 3 and len(set(answers)) == 1
    assert left == "['MainThread'] []"


def test_a_script_that_forgets_to_close_ends_all_the_same(tiny_llama: TinyLlama) -> None:
    done = python(
        """
        import sys
        from kadence.cluster import LLM
        llm = LLM(sys.argv[1])
        stream = llm.stream("hello", max_tokens=4000, ignore_eos=True)
        next(stream)
        LLM(sys.argv[1]).generate("hello", max_tokens=1)
        sys.exit(7)
        """,
        str(tiny_llama.folder),
    )
    assert done.returncode == 7 and not done.stderr, done.stderr


def test_without_the_clusters_packages_the_install_line_is_told() -> None:
    done = python(
        """
        import sys
        sys.modules["torch"] = None
        from kadence.cluster import LLM
        from kadence import ExtraMissingError
        try:
            LLM()
        except ExtraMissingError as error:
            print(error)
        """
    )
    assert "pip install 'kadence[cluster]'" in done.stdout and done.stdout.count("\n") == 1, done.stderr


def test_the_example_runs(tiny_llama: TinyLlama) -> None:
    command = [sys.executable, str(Path("examples", "in_process.py")), str(tiny_llama.folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert "tokens per step" in lines[0] and "tokens per step" in lines[1] and lines[-1].endswith("]")
