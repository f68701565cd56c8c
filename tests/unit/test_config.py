"""One TOML file becomes one frozen config per service; what is wrong is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from kadence.errors import ConfigError
from services.runtime.config import Frozen, ModelConfig, ServiceConfig, assignment, load, show


class Options(Frozen):
    min_n: int = Field(2, ge=1)


class EngineConfig(ServiceConfig):
    model: ModelConfig
    page_size: int = Field(16, ge=1, le=256)
    names: tuple[str, ...] = ()
    ngram: Options = Options()


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_reads_its_section_and_the_shared_tables(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\npath = "m"\n[verifier]\npage_size = 32\n[verifier.ngram]\nmin_n = 3\n[drafter]\n')
    config = load(EngineConfig, path, "verifier")
    assert (config.page_size, config.model.path, config.model.dtype, config.ngram.min_n) == (32, "m", "auto", 3)


def test_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\npath = "m"\n[verifier]\npage_size = 32\n')
    overrides = {"verifier.page_size": 64, "model.dtype": "float32", "drafter.kind": "none", "verifier.ngram.min_n": 4}
    config = load(EngineConfig, path, "verifier", overrides)
    assert (config.page_size, config.model.dtype, config.ngram.min_n) == (64, "float32", 4)


def test_no_file_gives_defaults() -> None:
    assert load(ServiceConfig, None, "scheduler") == ServiceConfig()


def test_is_frozen() -> None:
    with pytest.raises(ValidationError):
        ServiceConfig().port = 1  # type: ignore[misc]


MODEL = '[model]\npath = "m"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[verifer]\n", 'unknown section [verifer]; did you mean "verifier"?'),
        (MODEL + "[verifier]\npag_size = 1\n", '[verifier] unknown key pag_size; did you mean "page_size"?'),
        (MODEL + "[verifier]\npage_size = 0\n", "[verifier] page_size = 0: should be greater than or equal to 1"),
        (MODEL + "[verifier]\npage_size = 'big'\n", '[verifier] page_size = "big": should be a valid integer'),
        (MODEL + "[verifier.ngram]\nmin_m = 2\n", '[verifier.ngram] unknown key min_m; did you mean "min_n"?'),
        (MODEL + "[verifier]\nlog_level = 'loud'\n", "[verifier] log_level = \"loud\": should be 'debug'"),
        (MODEL + "[verifier]\ndrain_seconds = nan\n", "[verifier] drain_seconds = NaN: should be a finite number"),
        ("[model]\npth = 'm'\n", '[model] unknown key pth; did you mean "path"?'),
        ("[model]\n", "[model] path is required"),
        ("", "[verifier] model is required"),
        ("verifier = 3\n", "verifier = 3: must be a table, [verifier]"),
        ("[model\n", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(EngineConfig, path, "verifier")
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and says in message and "\n" not in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load(ServiceConfig, tmp_path / "absent.toml", "scheduler")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("verifier.page_size=16", ("verifier.page_size", 16)),
        ("policy.name=fixed:7", ("policy.name", "fixed:7")),
        ("scheduler.drain_seconds=0.5", ("scheduler.drain_seconds", 0.5)),
        ('model.name="a=b"', ("model.name", "a=b")),
        ("model.name=a=b", ("model.name", "a=b")),
        ("drafter.kind=['a', 'b']", ("drafter.kind", ["a", "b"])),
    ],
)
def test_assignments_of_the_command_line(text: str, pair: tuple[str, object]) -> None:
    assert assignment(text) == pair


def test_wrong_overrides() -> None:
    with pytest.raises(ConfigError, match="must read"):
        assignment("page_size")
    with pytest.raises(ConfigError, match="unknown section"):
        load(ServiceConfig, None, "scheduler", {"schedular.port": 1})
    with pytest.raises(ConfigError, match=r"^scheduler = 1: must be a table, or set its keys, as scheduler\.KEY$"):
        load(ServiceConfig, None, "scheduler", {"scheduler": 1})
    with pytest.raises(ConfigError, match="port"):
        load(ServiceConfig, None, "scheduler", {"scheduler.port.x": 1, "scheduler.port": 70000})


def test_show_reads_back(tmp_path: Path) -> None:
    model = ModelConfig(path='a "quoted" \\ path é', name="n")
    config = EngineConfig(model=model, page_size=8, names=("x", "y"), ngram=Options(min_n=5), drain_seconds=0.25)
    assert load(EngineConfig, write(tmp_path, show(config, "verifier")), "verifier") == config
