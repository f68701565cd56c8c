"""What `kadence up` decides before anything starts, and what it makes of a start that failed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy import processes, ray_app, ray_head
from deploy.config import (
    HTTP_PORT,
    PUBLIC_PORT,
    SERVICES,
    free_port,
    http_port,
    load_plan,
    public_port,
    show_plan,
    to_toml,
)
from deploy.demo import Printer, Round, table
from deploy.placement import StartError
from kadence import ConfigError, GenerateResult, Stats
from services.runtime.config import load


def test_defaults() -> None:
    plan = load_plan(None, {})
    assert plan.cluster.transport == "ray"
    assert plan.replicas == {"scheduler": 1, "verifier": 1, "drafter": 1}
    assert plan.values["model.path"] == "smollm2-135m-instruct"
    for service, cls in SERVICES.items():
        assert load(cls, None, service, plan.values).host == "127.0.0.1"  # type: ignore[attr-defined]


def test_the_example_is_valid() -> None:
    plan = load_plan(Path(__file__).resolve().parents[2] / "examples" / "cluster.toml", {})
    assert plan.scheduler.port == 50051 and plan.scheduler.policy.name == "fixed:7"


def test_the_command_line_wins_over_the_file_and_the_file_over_the_cluster_host(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('cluster = {host = "127.0.0.2", drafters = 3}\ndrafter.host = "127.0.0.3"\npolicy.name = "off"\n')
    plan = load_plan(file, {"policy.name": "fixed:5"})
    assert plan.scheduler.host == "127.0.0.2" and plan.scheduler.policy.name == "fixed:5"
    assert plan.values["drafter.host"] == "127.0.0.3"
    assert plan.replicas["drafter"] == 3
    assert load_plan(file, {"drafter.kind": "none"}).replicas["drafter"] == 0


def test_hosts_of_several_nodes_are_left_to_the_nodes() -> None:
    assert "verifier.host" not in load_plan(None, {"cluster.host": "node"}).values


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("cluster.transport", "udp", "[cluster] transport"),
        ("cluster.verifiers", 65, "[cluster] verifiers = 65"),
        ("cluster.verifier", 2, 'did you mean "verifiers"?'),
        ("verifier.page_size", 0, "[verifier] page_size = 0"),
        ("scheduler.prot", 1, 'did you mean "port"?'),
    ],
)
def test_errors_name_section_key_and_value(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_plan(None, {key: value})
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_shown_plan_reads_back(tmp_path: Path) -> None:
    plan = load_plan(None, {"verifier.kv_tokens": 2048, "cluster.resources": {"verifier": {"GPU": 1.0}}})
    file = tmp_path / "shown.toml"
    file.write_text(show_plan(plan), encoding="utf-8")
    again = load_plan(file, {})
    assert show_plan(again) == show_plan(plan)
    assert again.cluster.resources == {"verifier": {"GPU": 1.0}}


def test_to_toml_keeps_awkward_text() -> None:
    values = {"model.path": 'a "b" \\c\n', "model.name": "ü", "cluster.host": ""}
    assert tomllib.loads(to_toml(values)) == {"model": {"path": 'a "b" \\c\n', "name": "ü"}, "cluster": {"host": ""}}


def test_the_public_port_gives_way_only_if_nobody_chose_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port} is in use"):
            public_port(load_plan(None, {"scheduler.port": port}))
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as taken:
        patch.setattr("deploy.config.PUBLIC_PORT", taken.getsockname()[1])
        assert public_port(load_plan(None, {})) not in (0, taken.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.config.PUBLIC_PORT", wanted := free_port())
        assert public_port(load_plan(None, {})) == wanted
    assert PUBLIC_PORT == 50051


def test_the_http_port_gives_way_only_if_nobody_chose_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"\[scheduler\] http_port: 127.0.0.1:{port} is in use"):
            http_port(load_plan(None, {"scheduler.http_port": port}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deploy.config.HTTP_PORT", port)
            assert http_port(load_plan(None, {})) not in (0, port)
    assert http_port(load_plan(None, {"scheduler.http_port": -1})) == -1
    assert http_port(load_plan(None, {"cluster.host": "node"})) == 0
    assert HTTP_PORT == 8000


def test_only_marked_processes_are_stopped() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours = f"test-{os.getpid()}"
    with (
        subprocess.Popen(command, env={**os.environ, processes.MARK: ours}) as mine,
        subprocess.Popen(command, env={**os.environ, processes.MARK: f"{ours}-other"}) as other,
    ):
        assert [process.pid for process in processes.members(ours)] == [mine.pid]
        processes.stop(ours)
        assert mine.wait(5) and other.poll() is None
        other.kill()


def test_a_process_that_ignores_the_request_is_ended() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    ours = f"test-{os.getpid()}-deaf"
    env = {**os.environ, processes.MARK: ours}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout and deaf.stdout.readline()
        processes.stop(ours, grace=0.1)
        assert deaf.wait(5) == -9


def test_threads_are_shared_between_replicas_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert processes.settings(1)["OMP_NUM_THREADS"] == "8"
    assert processes.settings(3)["OMP_NUM_THREADS"] == "2"
    assert processes.settings(16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert processes.settings(2)["OMP_NUM_THREADS"] == "5"


def test_the_reason_of_a_failed_start_is_the_services_own_line(tmp_path: Path) -> None:
    log = tmp_path / "verifier-0.log"
    log.write_text("INFO loading\nkadence: model.safetensors: damaged\n")
    error = StartError.of_log("verifier-0", log, "exit status 2")
    assert str(error) == "verifier-0 did not start: model.safetensors: damaged"
    assert error.log.startswith("INFO loading")
    assert str(StartError.of_log("x", tmp_path / "none.log", "exit status 1")) == "x did not start: exit status 1"


def test_the_reason_of_a_failed_deployment() -> None:
    trace = 'Traceback:\n  File "x.py", line 3\nkadence.errors.CheckpointError: a.safetensors: ends early\n\nat 3 s'
    assert ray_app.reason(trace) == "a.safetensors: ends early"
    assert ray_app.reason("The worker died.\n") == "The worker died."
    assert ray_app.reason("") == "no reason given"
    # What explains itself is not shown with its traceback; what does not, is.
    assert ray_app.failure("verifier", trace).log == "a.safetensors: ends early"
    assert ray_app.failure("verifier", "Traceback\nKeyError: 3").log == "Traceback\nKeyError: 3"
    assert str(ray_app.failure("drafter", trace)) == "drafter did not start: a.safetensors: ends early"


def test_ray_keeps_its_sockets_within_the_limit_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    outside = ray_head.folder(deep)
    assert outside.is_dir() and deep not in outside.parents
    ray_head.remove(outside)
    assert not outside.exists()


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:1", "127.0.0.1:x"])
def test_a_wrong_ray_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        ray_head.reachable(address)


def test_a_ray_that_does_not_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing answers"):
        ray_head.reachable(f"127.0.0.1:{free_port()}")


def test_the_demo_prints_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer()
    printer.add("a", "one ")
    printer.add("b", "x\ny")
    printer.add("a", "two\nlast")
    printer.end("a")
    printer.end("b")
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["       b │ x", "       a │ one two", "       a │ last", "       b │ y"]
    printer.add("a", "word " * 30)
    assert all(len(line) < 120 for line in capsys.readouterr().out.splitlines())


def test_the_demo_table() -> None:
    def one(seconds: float, stats: Stats) -> Round:
        answer = GenerateResult("", (1, 2, 3, 4), "length", stats, (), 0, "match", "m", "r")
        return Round(seconds, [answer] * 3)

    text = table([one(6.0, Stats(steps=4, committed=4))], [one(3.0, Stats(steps=2, verified=6, committed=4))])
    assert "2.00 times as fast; 3 of 3 answers are the same token ids." in text
    assert text.splitlines()[1].split() == ["plain", "decoding", "2.0", "2..2", "1.00", "0.00"]
    assert text.splitlines()[2].split() == ["speculation", "4.0", "4..4", "2.00", "3.00"]


def test_paths_mean_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "d").mkdir(parents=True)
    plan = load_plan(None, {"drafter.options.checkpoint": "here/d", "drafter.options.draft_vocabulary_file": ""})
    values = plan.with_model(tmp_path / "model").values
    assert values["drafter.options.checkpoint"] == str(tmp_path / "here/d")
    assert values["model.path"] == str(tmp_path / "model") and values["drafter.options.draft_vocabulary_file"] == ""
