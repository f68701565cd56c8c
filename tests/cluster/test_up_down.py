"""`kadence up` and `kadence down` as a user types them: it serves, it refuses, it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy import processes, ray_head
from tests.support.tiny_llama import TinyLlama

Run = Callable[..., subprocess.CompletedProcess[str]]
CACHES = ("models", "kernels")  # the user's, not a cluster's
KADENCE = [sys.executable, "-m", "kadence.cli"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(tmp_path_factory.mktemp("up") / "tiny").folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder of this test; short, since sockets go there."""
    with tempfile.TemporaryDirectory(prefix="kd-") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def home(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("KADENCE_HOME", str(folder))
    monkeypatch.delenv("KADENCE_ENDPOINT", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return folder


@pytest.fixture
def kadence(home: Path) -> Iterator[Run]:
    """Runs a command; whatever the test did, no cluster stays."""

    def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*KADENCE, *arguments], capture_output=True, text=True, timeout=timeout)

    yield run
    run("down")


def record(home: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((home / "cluster.json").read_text(encoding="utf-8"))
    return state


def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {what}")


def left_over(home: Path) -> list[list[str]]:
    """Command lines of what this test's commands started, marked as a cluster's or not."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("KADENCE_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.fixture
def nothing_left(home: Path, temporary: Path) -> Iterator[Callable[[], None]]:
    """Asserts that the test's cluster left no process and no file; a last time when the test ends."""

    def check() -> None:
        assert not left_over(home)
        assert not list(temporary.iterdir())
        assert not [path for path in home.glob("*") if path.name not in CACHES]

    yield check
    check()


def generate(kadence: Run) -> dict[str, Any]:
    done = kadence("generate", "--prompt", "hello hello hello", "--max-tokens", "24", "--ignore-eos", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def over_http(kadence: Run, home: Path, printed: str) -> str:
    """The text of the same request over HTTP, at the address that is recorded, printed and shown."""
    address = record(home)["http"]
    assert f"http://{address}/v1" in printed and address in kadence("status").stdout
    body = {"prompt": "hello hello hello", "max_tokens": 24, "ignore_eos": True}
    asked = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


@pytest.mark.parametrize("transport", ["grpc", "inproc"])
def test_up_generate_down(
    transport: str, kadence: Run, nothing_left: Callable[[], None], model: Path, home: Path
) -> None:
    up = kadence("up", "--transport", transport, "--model", str(model), "--policy", "fixed:3")
    assert up.returncode == 0, up.stderr
    for kind in ("scheduler", "drafter", "verifier"):
        assert f"{kind}: 1 of 1 ready" in up.stderr
    answer = generate(kadence)
    assert len(answer["token_ids"]) == 24
    assert answer["stats"]["verified"] > 0 and len(answer["stats"]["k_hist"]) <= 4
    assert over_http(kadence, home, up.stdout) == answer["text"]
    again = kadence("up", "--transport", transport, "--model", str(model))
    assert again.returncode == 1
    assert "a cluster is running already" in again.stderr and "kadence down" in again.stderr
    assert generate(kadence)["token_ids"] == answer["token_ids"]  # the running one was not touched
    down = kadence("down")
    assert down.returncode == 0, down.stderr
    nothing_left()
    assert kadence("down").stdout == "No cluster is running.\n"


@pytest.mark.timeout(400)
def test_on_ray(kadence: Run, nothing_left: Callable[[], None], model: Path, home: Path) -> None:
    up = kadence("up", "--model", str(model), timeout=180)
    assert up.returncode == 0, up.stderr
    assert record(home)["ray_address"].startswith("127.0.0.1:")
    answer = generate(kadence)
    assert over_http(kadence, home, up.stdout) == answer["text"]
    status = json.loads(kadence("status", "--json").stdout)
    addresses = [replica["address"] for replica in status["replicas"]]
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses
    # Serve supervises: a verifier that is killed comes back, and the text is the same.
    killed = next(replica["pid"] for replica in status["replicas"] if replica["kind"] == "verifier")
    os.kill(killed, signal.SIGKILL)

    def replaced() -> bool:
        replicas = json.loads(kadence("status", "--json").stdout)["replicas"]
        return any(r["kind"] == "verifier" and r["state"] == "ready" and r["pid"] != killed for r in replicas)

    wait_for(replaced)
    assert generate(kadence)["token_ids"] == answer["token_ids"]
    down = kadence("down", timeout=180)
    assert down.returncode == 0, down.stderr
    nothing_left()


@pytest.mark.timeout(400)
def test_joins_a_running_ray(
    kadence: Run, nothing_left: Callable[[], None], model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"other-{os.getpid()}"  # somebody else's Ray
    monkeypatch.delenv("KADENCE_HOME")
    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp") as temp:
        try:
            monkeypatch.setenv("RAY_ADDRESS", ray_head.start(Path(temp), name, 1))
            before = {process.pid for process in processes.members(name)}
            monkeypatch.setenv("KADENCE_HOME", str(home))
            up = kadence("up", "--model", str(model), timeout=180)
            assert up.returncode == 0, up.stderr
            assert "ray: joined at" in up.stderr
            assert len(generate(kadence)["token_ids"]) == 24
            assert kadence("down", timeout=180).returncode == 0
            nothing_left()
            assert {process.pid for process in processes.members(name)} == before  # it is as we found it
        finally:
            processes.stop(name)


def damaged(model: Path, folder: Path) -> Path:
    """A copy of the model whose weights end half-way."""
    folder.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["grpc", "inproc", "ray"])
def test_a_damaged_model_is_one_clear_line(
    transport: str, kadence: Run, nothing_left: Callable[[], None], model: Path, tmp_path: Path
) -> None:
    up = kadence("up", "--transport", transport, "--model", str(damaged(model, tmp_path / "damaged")), timeout=180)
    assert up.returncode == 1
    last = up.stderr.splitlines()[-1]
    assert last.startswith("kadence: ") and "did not start" in last and "model.safetensors" in last
    nothing_left()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[verifier]\npage_sice = 16\n", 'unknown key page_sice; did you mean "page_size"?'),
        ("[verifyer]\n", "unknown section [verifyer]"),
        ("[cluster]\nverifiers = 0\n", "[cluster] verifiers = 0"),
        ("[policy]\nname = 'fixed:x'\n", "fixed:x"),
        ("[drafter]\nkind = ['ngram', 'none']\n", "drafter"),
        ("[model]\npath = 'nowhere/at/all'\n", "nowhere/at/all"),
    ],
)
def test_wrong_configurations(
    text: str, says: str, kadence: Run, nothing_left: Callable[[], None], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    up = kadence("up", "-f", str(file))
    assert up.returncode == 1
    last = up.stderr.splitlines()[-1]
    assert last.startswith("kadence: ") and says in last
    nothing_left()


def test_a_configured_port_in_use_is_refused(kadence: Run, nothing_left: Callable[[], None], model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        up = kadence("up", "--transport", "grpc", "--model", str(model), "--set", f"scheduler.port={port}")
    assert up.returncode == 1
    assert f"127.0.0.1:{port} is in use" in up.stderr
    nothing_left()


def starting(home: Path, model: Path) -> subprocess.Popen[str]:
    """A `kadence up` that has started its first service and is not done."""
    command = [*KADENCE, "up", "--transport", "grpc", "--model", str(model)]
    up = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (home / "cluster.json").exists() and processes.members(record(home)["cluster_id"]))
    return up


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_undoes_itself(
    number: signal.Signals, home: Path, nothing_left: Callable[[], None], model: Path
) -> None:
    up = starting(home, model)
    up.send_signal(number)
    up.communicate(timeout=60)
    assert up.returncode == 130
    nothing_left()


def test_down_cleans_up_after_a_killed_up(
    kadence: Run, home: Path, nothing_left: Callable[[], None], model: Path
) -> None:
    up = starting(home, model)
    up.kill()
    up.communicate()
    assert kadence("down").returncode == 0
    nothing_left()


def test_down_stops_an_up_at_work(kadence: Run, home: Path, nothing_left: Callable[[], None], model: Path) -> None:
    up = starting(home, model)
    assert kadence("down").returncode == 0
    up.communicate(timeout=60)
    assert up.returncode == 130
    nothing_left()


def test_up_cleans_up_after_a_cluster_that_died(
    kadence: Run, home: Path, nothing_left: Callable[[], None], model: Path
) -> None:
    assert kadence("up", "--transport", "grpc", "--model", str(model)).returncode == 0
    for process in processes.members(record(home)["cluster_id"]):
        process.kill()
    wait_for(lambda: not processes.members(record(home)["cluster_id"]))
    up = kadence("up", "--transport", "inproc", "--model", str(model))
    assert up.returncode == 0, up.stderr
    assert "cleaning up" in up.stderr
    assert kadence("down").returncode == 0
    nothing_left()
