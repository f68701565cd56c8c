"""What a wrong start says: one line that names the thing, its value and the limit; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import cluster
from deploy.config import load_plan, public_port
from kadence import _state
from kadence.errors import CheckpointError, ConfigError, InvalidRequestError
from services.runtime.config import ModelConfig
from services.scheduler.chat_template import ChatTemplate
from services.scheduler.policy import parse
from services.verifier.config import VerifierConfig
from services.verifier.service import check_memory, resolve_limits
from services.verifier.target import Target
from tests.support.tiny_llama import TinyLlama


@pytest.mark.parametrize("host", ["192.0.2.1", "no such"])
def test_host_that_is_nobodys(host: str) -> None:
    plan = load_plan(None, {"cluster.host": host, "cluster.transport": "grpc"})
    with pytest.raises(ConfigError, match=r"host: .*cannot be bound"):
        public_port(plan)


def test_home_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KADENCE_HOME", "/proc/nope/home")  # nobody, root included, makes folders there
    with pytest.raises(ConfigError, match="cannot be written"):
        cluster.up(load_plan(None, {"cluster.transport": "grpc"}), lambda line: None)


def test_home_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KADENCE_HOME", str(file))
    with pytest.raises(ConfigError, match=f"^{file}: is not a folder$"):
        cluster.up(load_plan(None, {}), lambda line: None)


def test_where_nothing_had_started_nothing_is_said_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path / "home"))
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no-such-model"):
        cluster.up(load_plan(None, {"model.path": "no-such-model"}), said.append)
    assert said == ["model no-such-model"]


@pytest.mark.parametrize("act", [lambda: cluster.down(print), lambda: cluster.up(load_plan(None, {}), print)])
def test_record_of_something_else(act: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path))
    _state.state_path().write_text(json.dumps({"phase": "up"}))
    with pytest.raises(ConfigError, match="not the record of a cluster"):
        act()  # type: ignore[operator]


def test_kv_beyond_the_machine(tiny_llama: TinyLlama) -> None:
    config = VerifierConfig(model=ModelConfig(path=str(tiny_llama.folder)), kv_tokens=10**13)
    target = Target(tiny_llama.folder, "float32")
    with pytest.raises(ConfigError, match=r"kv_tokens = 10000000000000: takes \d+ GiB of KV, the machine has \d+ GiB"):
        check_memory(config, target, resolve_limits(config, target))


def test_chat_template_that_is_no_text() -> None:
    with pytest.raises(CheckpointError, match="chat_template is 5, expected text"):
        ChatTemplate(5, {})  # type: ignore[arg-type]


def test_chat_template_that_fails() -> None:
    with pytest.raises(InvalidRequestError, match="ZeroDivisionError"):
        ChatTemplate("{{ 1 / 0 }}", {}).render([("user", "hello")])


def test_policy_digits_are_ascii() -> None:
    with pytest.raises((ConfigError, ValueError)):
        parse("fixed:٣")
