"""The command line, as a process of its own, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from kadence import InvalidRequestError, NotFoundError, UnavailableError
from kadence.testing import FakeGateway
from tests.support.scripted import HELLO, Script, Servicer, chunk, finished, serving, started

ROOT = Path(__file__).resolve().parents[2]
# Fails every import of a package that only the extras bring.
BLOCK = "import sys; sys.modules.update(dict.fromkeys(('torch', 'ray', 'numpy', 'gguf', 'tokenizers'))); "
MAIN = "import sys; from kadence.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def environment(home: Path, **extra: str) -> dict[str, str]:
    return {**os.environ, "KADENCE_HOME": str(home), "KADENCE_ENDPOINT": "", "PYTHONIOENCODING": "", **extra}


async def start(home: Path, *args: str, prelude: str = "", **extra: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", prelude + MAIN, *args),
        cwd=ROOT,
        env=environment(home, **extra),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(home: Path, *args: str, stdin: str = "", prelude: str = "", **extra: str) -> Ran:
    process = await start(home, *args, prelude=prelude, **extra)
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 30)
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


def one_line(text: str) -> str:
    assert text.startswith("kadence: ") and text.endswith("\n") and text.count("\n") == 1, text
    return text


async def test_generate_prints_the_text(tmp_path: Path) -> None:
    servicer = Servicer()
    async with serving(servicer) as address:
        ran = await run(tmp_path, "generate", "--prompt", "Hi", KADENCE_ENDPOINT=address)
        plain = await run(tmp_path, "generate", "--prompt", "Hi", "--no-stream", "--stats", "--endpoint", address)
    assert (ran.code, ran.out, ran.err) == (0, "Hello you\n", "")
    assert (plain.code, plain.out) == (0, "Hello you\n")
    assert "acceptance length 2.50" in plain.err
    assert [request.prompt for request in servicer.requests] == ["Hi", "Hi"]


async def test_text_arrives_live(tmp_path: Path) -> None:
    async with serving(Servicer([[started(), chunk("first", 1), 30.0]])) as address:
        process = await start(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(5), 20) == b"first"
        process.kill()
        await process.communicate()


async def test_json_is_one_object_of_exactly_these_keys(tmp_path: Path) -> None:
    async with serving(Servicer()) as address:
        ran = await run(tmp_path, "generate", "--prompt", "Hi", "--json", "--endpoint", address)
    assert ran.code == 0 and ran.err == ""
    assert json.loads(ran.out) == {
        "text": "Hello you",
        "token_ids": [10, 11, 12, 13],
        "finish_reason": "stop",
        "seed": 7,
        "logprobs": [],
        "stats": {
            "steps": 4,
            "drafted": 12,
            "verified": 10,
            "accepted": 6,
            "acceptance_length": 2.5,
            "k_hist": [1, 0, 2, 1],
            "cached_tokens": 3,
        },
        "alternatives": [],
        "resumes": 0,
    }


async def test_every_flag_reaches_the_request(tmp_path: Path) -> None:
    servicer = Servicer()
    flags = (
        "--max-tokens 5 --min-tokens 2 --temperature 0.5 --top-p 0.25 --top-k 3 --min-p 0.125 --seed 9 "
        "--stop a --stop b --stop-token-ids 4,5 --ignore-eos --rule ratio --max-draft-tokens 0 "
        "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5 --logit-bias 3=-1,4=2 "
        "--allowed-token-ids 1,2 --bad-words x "
        "--n 1 --logprobs 0 --priority 2 --model tiny --request-id r-7 --timeout 20"
    )
    async with serving(servicer) as address:
        ran = await run(tmp_path, "generate", "--prompt-token-ids", "1,2", "--endpoint", address, *flags.split())
    assert ran.code == 0, ran.err
    (request,) = servicer.requests
    sampling = request.sampling
    assert (list(request.prompt_token_ids), request.model, request.request_id) == ([1, 2], "tiny", "r-7")
    assert (list(sampling.stop), list(sampling.stop_token_ids), dict(sampling.logit_bias)) == (
        ["a", "b"],
        [4, 5],
        {3: -1.0, 4: 2.0},
    )
    unset = {field.name for field in sampling.DESCRIPTOR.fields} - {field.name for field, _ in sampling.ListFields()}
    assert not unset


async def test_several_answers_with_logprobs(tmp_path: Path) -> None:
    with FakeGateway({"Hi": ("one", "two")}) as gateway:
        flags = ("generate", "--prompt", "Hi", "--n", "2", "--endpoint", gateway.endpoint)
        shown = await run(tmp_path, *flags, "--stats")
        gateway.break_off(2)
        parsed = await run(tmp_path, *flags, "--json", "--logprobs", "1")
    assert (shown.code, shown.out) == (0, "--- answer 0\none\n--- answer 1\ntwo\n")
    assert shown.err.count("3 tokens, stop") == 2
    result = json.loads(parsed.out)
    (other,) = result["alternatives"]
    assert (result["text"], other["text"], result["resumes"]) == ("one", "two", 1)
    assert other["token_ids"] == [*b"two"] and "alternatives" not in other
    assert other["seed"] == result["seed"] + 1
    first = result["logprobs"][0]
    assert (first["token_id"], first["top"]) == (ord("o"), [{"token_id": ord("o"), "logprob": first["logprob"]}])


async def test_a_live_answer_is_resumed(tmp_path: Path) -> None:
    with FakeGateway({"Hi": "é日🙂"}) as gateway:
        gateway.break_off(1, 2, 2)
        ran = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", gateway.endpoint)
    assert (ran.code, ran.out, ran.err) == (0, "é日🙂\n", "") and len(gateway.requests) == 4


async def test_tls_and_token(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf, client = authority.issue_cert("kadence.example"), authority.issue_cert("me@kadence.example")
    pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
    proof = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), True)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    client.private_key_pem.write_to_path(tmp_path / "key.pem")
    client.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    flags = ("--tls-ca", tmp_path / "ca.pem", "--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    with FakeGateway({"Hi": "Hello"}, credentials=proof) as gateway:
        common = ("--endpoint", gateway.endpoint, "--tls-name", "kadence.example", *map(str, flags))
        ran = await run(tmp_path, "generate", "--prompt", "Hi", *common, KADENCE_TOKEN="t-1")
        status = await run(tmp_path, "status", *common)
        distrusted = await run(tmp_path, "status", "--tls", "--endpoint", gateway.endpoint)
    assert (ran.code, ran.out) == (0, "Hello\n"), ran.err
    assert gateway.requests[0].metadata["authorization"] == "Bearer t-1"
    assert status.code == 0, status.err
    assert distrusted.code == 1 and "certificate is from no authority" in one_line(distrusted.err)
    assert "kadence up" not in distrusted.err
    far = await run(tmp_path, "status", "--endpoint", "kadence.example:1", KADENCE_TOKEN="t-1")
    assert far.code == 1 and one_line(far.err).startswith("kadence: KADENCE_TOKEN: would travel unencrypted")
    assert "t-1" not in far.err


async def test_conversations(tmp_path: Path) -> None:
    servicer = Servicer()
    talk = json.dumps([{"role": "user", "content": "é"}])
    async with serving(servicer) as address:
        for args, stdin in (
            (("--messages-json", talk), ""),
            (("--messages-json", "-", "--system", "S"), talk),
            (("--prompt", "é", "--system", "S"), ""),
            (("--prompt", "é", "--chat"), ""),
        ):
            ran = await run(tmp_path, "generate", *args, stdin=stdin, KADENCE_ENDPOINT=address)
            assert ran.code == 0, ran.err
    sent = [[(message.role, message.content) for message in request.messages] for request in servicer.requests]
    user, system = ("user", "é"), ("system", "S")
    assert sent == [[user], [system, user], [system, user], [user]]
    assert not any(request.HasField("prompt") for request in servicer.requests)


async def test_errors_are_one_line_and_exit_1(tmp_path: Path) -> None:
    scripts: list[Script] = [
        [InvalidRequestError.of("sampling.top_p", "2.0 is outside\n(0, 1]")],
        [started("r-4"), chunk("par", 1), NotFoundError("lost")],
    ]
    async with serving(Servicer(scripts)) as address:
        bad = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address)
        cut = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address)
    assert (bad.code, bad.out) == (1, "") and one_line(bad.err) == "kadence: sampling.top_p: 2.0 is outside (0, 1]\n"
    assert (cut.code, cut.out) == (1, "par\n") and one_line(cut.err) == "kadence: lost (NOT_FOUND) [request r-4]\n"
    down = await run(tmp_path, "status", "--endpoint", address)
    assert down.code == 1 and address in one_line(down.err) and "kadence up" in down.err
    nowhere = await run(tmp_path, "status")
    assert nowhere.code == 1 and "kadence up" in one_line(nowhere.err)
    for wrong in ("{", "{}"):
        ran = await run(tmp_path, "generate", "--messages-json", wrong, "--endpoint", address)
        assert ran.code == 1 and "--messages-json" in one_line(ran.err)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nonsense",),
        ("generate",),
        ("generate", "--prompt", "a", "--messages-json", "[]"),
        ("generate", "--prompt", "a", "--rule", "magic"),
        ("generate", "--prompt", "a", "--max-tokens", "many"),
        ("generate", "--prompt", "a", "--nonsense"),
    ],
)
async def test_wrong_usage_is_one_line_and_exits_2(args: tuple[str, ...], tmp_path: Path) -> None:
    ran = await run(tmp_path, *args)
    assert ran.code == 2 and ran.out == ""
    assert one_line(ran.err).startswith("kadence: ") and "--help`" in ran.err


@pytest.mark.parametrize(
    ("flag", "value", "form"),
    [
        ("--prompt-token-ids", "", "token ids, comma-separated"),
        ("--prompt-token-ids", "1,a", "token ids, comma-separated"),
        ("--stop-token-ids", "1,x", "token ids, comma-separated"),
        ("--logit-bias", "3", "ID=X pairs, comma-separated"),
    ],
)
async def test_a_wrong_list_is_one_line_and_exits_2(flag: str, value: str, form: str, tmp_path: Path) -> None:
    ran = await run(tmp_path, "generate", flag, value)
    assert (ran.code, ran.out) == (2, "") and one_line(ran.err) == f"kadence: {flag}: {value!r}; {form}\n"


async def test_a_scheduler_that_answers_is_not_called_out_of_reach(tmp_path: Path) -> None:
    scripts: list[Script] = [[UnavailableError("no verifier is ready")]]
    async with serving(Servicer(scripts)) as address:
        ran = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address)
    advice = "try again, or see `kadence status`"
    assert ran.code == 1 and one_line(ran.err) == f"kadence: no verifier is ready (UNAVAILABLE); {advice}\n"
    down = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address)
    assert down.code == 1 and one_line(down.err).startswith("kadence: the cluster cannot be reached (")
    assert down.err.endswith("; `kadence up` starts one\n")


@pytest.mark.parametrize("flags", [(), ("--json",)])
async def test_ctrl_c_cancels_the_request(flags: tuple[str, ...], tmp_path: Path) -> None:
    servicer = Servicer([[started(), chunk("some", 1), 30.0]])
    async with serving(servicer) as address:
        process = await start(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address, *flags)
        async with asyncio.timeout(20):
            while not servicer.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 10)
        await asyncio.wait_for(servicer.cancelled.wait(), 5)
    assert process.returncode == 130
    assert (out, err) == (b"" if flags else b"some\n", b"kadence: cancelled\n")


async def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    many: Script = [started(), *(chunk("x" * 1000, 1) for _ in range(500)), finished()]
    async with serving(Servicer([many])) as address:
        command = f'"{sys.executable}" -c "{MAIN}" generate --prompt Hi --endpoint {address} | head -c 5'
        process = await asyncio.create_subprocess_shell(
            command,
            cwd=ROOT,
            env=environment(tmp_path),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
    assert (out, err) == (b"xxxxx", b"")


async def test_a_poor_terminal_shows_what_it_can(tmp_path: Path) -> None:
    async with serving(Servicer([[started(), chunk("aé", 1), finished()]])) as address:
        ran = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address, PYTHONIOENCODING="ascii")
    assert (ran.code, ran.out) == (0, "a?\n")


async def test_status(tmp_path: Path) -> None:
    async with serving(Servicer([HELLO])) as address:
        shown = await run(tmp_path, "status", "--endpoint", address)
        parsed = await run(tmp_path, "status", "--json", "--endpoint", address)
    assert shown.code == 0
    total, _, header, row, _, problem = shown.out.splitlines()
    assert total == "policy fixed:7 (epoch b:1); 2 in flight, 1 queued"
    assert header.split()[:3] == ["KIND", "STATE", "ADDRESS"]
    assert row.split() == ["verifier", "ready", "127.0.0.1:5001", "tiny", "2", "0", "3/8", "2.50", "-", "42", "-", "-"]
    assert problem == "verifier v-1: the drafter's vocabulary is 5, the target's is 6"
    status = json.loads(parsed.out)
    assert status["policy"] == "fixed:7" and status["replicas"][0]["stats"]["committed"] == 5


async def test_a_plain_install_works_and_names_the_extra(tmp_path: Path) -> None:
    async with serving(Servicer()) as address:
        ran = await run(tmp_path, "generate", "--prompt", "Hi", "--endpoint", address, prelude=BLOCK)
    assert (ran.code, ran.out) == (0, "Hello you\n")
    fetch = await run(tmp_path, "models", "fetch", "x", "--from", __file__, prelude=BLOCK)
    assert fetch.code == 1 and "pip install 'kadence[cluster]'" in one_line(fetch.err.splitlines(keepends=True)[-1])
    listed = await run(tmp_path, "models", "list", prelude=BLOCK)
    assert listed.code == 0 and listed.out.split()[:3] == ["smollm2-135m-instruct", "not", "fetched"]


async def test_a_command_that_cannot_be_loaded_names_the_extra(tmp_path: Path) -> None:
    block = "import sys; sys.modules['deploy.commands'] = None; "
    ran = await run(tmp_path, "up", "-f", "x.toml", prelude=block)
    assert ran.code == 1 and "pip install 'kadence[cluster]'" in one_line(ran.err)
    helped = await run(tmp_path, "--help", prelude=block)
    assert helped.code == 0 and "generate" in helped.out and "not installed" in helped.out


async def test_the_command_line_starts_light(tmp_path: Path) -> None:
    """No command is imported with its heavy packages only to print the help."""
    code = (
        "import sys; from kadence import cli; cli._parser(''); "
        "print([m for m in ('torch', 'ray', 'numpy', 'gguf', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert out == b"[]\n"
