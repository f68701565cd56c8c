"""The committed stubs are exactly what `make proto` generates, and load on the versions we promise to run on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERN = "kadence/*/*_pb2*.py*"


def generated(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.glob(PATTERN)}


def test_committed_stubs_are_current(tmp_path: Path) -> None:
    """Wherever this fails, `make proto` and a commit repair it."""
    command = ["make", "--no-print-directory", "proto", f"OUT={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    fresh, committed = generated(tmp_path), generated(ROOT)
    assert fresh, "make proto wrote nothing"
    assert sorted(committed) == sorted(fresh)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, f"run `make proto` and commit: {stale}"


def test_stubs_ask_for_no_more_than_the_sdk_promises() -> None:
    """The generator's version becomes the floor of grpcio and protobuf; it must not pass pyproject's floor."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    floor_grpc = re.search(r'"grpcio>=([\d.]+)', project)
    floor_protobuf = re.search(r'"protobuf>=([\d.]+)', project)
    assert floor_grpc and floor_protobuf
    for name, text in generated(ROOT).items():
        if name.endswith("_pb2_grpc.py"):
            asked = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", text)
            assert asked and version(asked[1]) <= version(floor_grpc[1]), name
        elif name.endswith("_pb2.py"):
            asked = re.search(r"Protobuf Python Version: ([\d.]+)", text)
            assert asked and version(asked[1]) <= version(floor_protobuf[1]), name


def version(text: str) -> tuple[int, ...]:
    """Padded to three numbers, so that 1.76 equals 1.76.0."""
    return (*(int(part) for part in text.split(".")), 0, 0)[:3]
