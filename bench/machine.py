"""What was measured where: commit, package versions, and the machine's facts."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("kadence", "torch", "transformers", "tokenizers", "grpcio", "protobuf", "ray", "numpy")


def facts() -> dict[str, Any]:
    """JSON-able facts that a result must carry to be compared with another."""
    return {
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain").splitlines()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": os.getloadavg(),
    }


def busy(seconds: float = 1.0) -> float:
    """Cores that somebody uses now, while we do nothing: they are missing in what is measured next."""
    return psutil.cpu_percent(seconds) / 100 * (os.cpu_count() or 1)


def _git(*arguments: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> dict[str, Any]:
    """Model name and the instruction sets that decide how fast bfloat16 is."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        return {"model": platform.processor()}
    flags = set(fields.get("flags", "").split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
    return {"model": fields.get("model name", ""), "flags": [flag for flag in wanted if flag in flags]}
