"""The README's HTTP examples against a real cluster: by curl where it is installed, else by a reader of its options."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shlex
import shutil
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from deploy.config import load_plan
from deploy.inproc import InprocCluster
from kadence import AsyncClient
from tests.support.scheduling import until
from tests.support.tiny_llama import TinyLlama

README = Path(__file__).resolve().parents[2] / "README.md"
ADDRESS, MODEL = "127.0.0.1:8000", "smollm2-135m-instruct"


def blocks(language: str) -> list[str]:
    """The code blocks of the section about HTTP."""
    section = README.read_text(encoding="utf-8").split("\n## HTTP\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


COMMANDS = [command.strip() for block in blocks("sh") for command in re.split(r"\n\n", block)]


@pytest.fixture(scope="module")
async def cluster(tiny_llama: TinyLlama) -> AsyncIterator[InprocCluster]:
    """All of a cluster in this process, called as the README's."""
    values = {"model.path": str(tiny_llama.folder), "model.name": MODEL, "model.dtype": "float32"}
    quiet = {f"{service}.metrics_port": -1 for service in ("scheduler", "verifier", "drafter")}
    async with InprocCluster(load_plan(None, values | quiet), name="readme") as running:
        async with AsyncClient(running.endpoint) as client:

            async def ready() -> bool:
                return any(r.kind == "verifier" and r.state == "ready" for r in (await client.status()).replicas)

            await until(ready, seconds=30)
        yield running


async def run(command: str, address: str, *, by_curl: bool) -> tuple[int, str]:
    """(status, body) of a command of the README."""
    command = command.replace(ADDRESS, address)
    if not by_curl:
        return await asyncio.to_thread(imitate, shlex.split(command))
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command + " -w '\n%{http_code}'", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors
    body, _, status = out.decode().rpartition("\n")
    return int(status), body


def imitate(arguments: list[str]) -> tuple[int, str]:
    """What curl does with the few options that the README uses; any other is an error."""
    assert arguments.pop(0) == "curl"
    url, data, headers = "", None, {}
    while arguments:
        argument = arguments.pop(0)
        if argument == "-H":
            name, _, value = arguments.pop(0).partition(":")
            headers[name] = value.strip()
        elif argument == "-d":
            data = arguments.pop(0).encode()
        elif argument.startswith("http"):
            url = argument
        else:
            assert argument in ("-s", "-S", "-sS", "-N"), f"{argument}: teach this test what it means"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(body: str) -> list[Any]:
    """The JSON of a stream's events, which must end as OpenAI's do."""
    *lines, done = [line for line in body.split("\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def expect(command: str, body: str) -> None:
    """That the answer is what the example is there to show."""
    path = re.search(rf"{ADDRESS}(\S+)", command)
    assert path is not None
    asked = json.loads(shlex.split(command)[-1]) if " -d " in command else {}
    if asked.get("stream"):
        chunks = events(body)
        assert {c["index"] for chunk in chunks for c in chunk["choices"]} == set(range(asked["n"]))
        assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["kadence"]["seed"] == asked["seed"]
        return
    answer = json.loads(body)
    if path[1] == "/v1/models":
        assert [model["id"] for model in answer["data"]] == [MODEL]
    elif path[1] == "/health":
        assert answer == {"status": "ok"}
    else:
        assert 0 < answer["usage"]["completion_tokens"] <= asked["max_tokens"] and len(answer["choices"]) == 1
        if "logprobs" in asked:
            shown = answer["choices"][0]["logprobs"]
            assert len(shown["tokens"]) == answer["usage"]["completion_tokens"]
            assert len(answer["kadence"]["stats"][0]["k_hist"]) <= asked["kadence"]["max_draft_tokens"] + 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split("\n")[0][:60])
async def test_commands(command: str, cluster: InprocCluster) -> None:
    status, body = await run(command, cluster.http, by_curl=shutil.which("curl") is not None)
    assert status == 200, body
    expect(command, body)
    if "/completions" in command:  # a fresh machine may have no curl: what stands in for it must do the same
        status, body = await run(command, cluster.http, by_curl=False)
        assert status == 200, body
        expect(command, body)


async def test_the_answer_is_the_sdks(cluster: InprocCluster) -> None:
    command = next(command for command in COMMANDS if "sky" in command)
    asked = json.loads(shlex.split(command)[-1])
    _, body = await run(command, cluster.http, by_curl=False)
    async with AsyncClient(cluster.endpoint) as client:
        result = await client.generate(messages=asked["messages"], max_tokens=asked["max_tokens"])
    assert json.loads(body)["choices"][0]["message"]["content"] == result.text


async def test_the_python_example(cluster: InprocCluster) -> None:
    (code,) = blocks("python")
    printed = io.StringIO()

    def execute() -> None:
        with contextlib.redirect_stdout(printed):
            exec(compile(code.replace(ADDRESS, cluster.http), str(README), "exec"), {})

    await asyncio.to_thread(execute)
    assert "CompletionUsage(" in printed.getvalue() and "acceptance_length" in printed.getvalue()


def test_there_are_examples() -> None:
    assert len(COMMANDS) >= 4 and all(command.startswith("curl ") for command in COMMANDS)


async def test_a_broken_example_is_noticed(cluster: InprocCluster) -> None:
    command = COMMANDS[1].replace('"messages"', '"mesages"')
    status, body = await run(command, cluster.http, by_curl=False)
    assert status == 400 and "did you mean messages" in body
