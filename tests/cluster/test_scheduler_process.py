"""The scheduler as a process: it starts, serves, stops when told, and says in one line why it cannot start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kadence import Client

ROOT = Path(__file__).resolve().parents[2]


def start(*settings: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.scheduler"]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def ready(tokenizer_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, str, str]]:
    """(process, address, metrics address, HTTP address)."""
    process = start(f"model.path={tokenizer_folder}", "model.name=mini", "policy.name=off")
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("READY scheduler "), process.communicate(timeout=10)
        _, _, address, metrics, http = line.split()
        yield process, address, metrics.removeprefix("metrics="), http.removeprefix("http=")
    finally:
        process.kill()
        process.communicate(timeout=10)


def test_serves_and_stops(ready: tuple[subprocess.Popen[str], str, str, str]) -> None:
    process, address, metrics, http = ready
    with Client(address) as client:
        status = client.status()
        assert status.policy == "off" and status.replicas[0].pid == process.pid
        assert [model.name for model in client.models()] == ["mini"]
        assert status.replicas[0].http_address == http
    with urllib.request.urlopen(f"http://{http}/health", timeout=5) as response:
        assert json.load(response) == {"status": "ok"}
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as response:
        page = response.read().decode()
    for name in ("num_requests_running", "num_requests_waiting", "policy_epoch", "time_to_first_token_seconds_count"):
        assert f'kadence_{name}{{model_name="mini",service="scheduler"}}' in page
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0 and "Traceback" not in errors, errors


def failure(*settings: str) -> str:
    """The line with which a start fails."""
    process = start(*settings)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and not out
    assert errors.count("\n") == 1 and errors.startswith("kadence: "), errors
    return errors


def test_why_it_cannot_start(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = f"model.path={tokenizer_folder}"
    damaged = tmp_path / "damaged"
    shutil.copytree(tokenizer_folder, damaged)
    os.truncate(damaged / "tokenizer.json", 1000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        cases = {
            (model, f"scheduler.port={port}"): [f"127.0.0.1:{port} is in use"],
            (model, f"scheduler.http_port={port}"): ["http_port", f"127.0.0.1:{port} is in use"],
            (f"model.path={tmp_path / 'nowhere'}",): ["nowhere", "no such folder"],
            (f"model.path={damaged}",): ["damaged", "tokenizer.json", "cannot be read"],
            (model, "scheduler.max_quue=3"): ["unknown key max_quue", "max_queue"],
            (model, "policy.name=fixed:99"): ["policy", "name", "fixed:99", "at most 64"],
        }
        for settings, words in cases.items():
            line = failure(*settings)
            assert all(word in line for word in words), line
