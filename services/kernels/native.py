"""Compiles the C kernels for this machine's processor, once, and loads them; without a compiler there are none.

Kept in the user's cache under a hash of source, headers, flags and processor, as Triton keeps its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401 - brings the OpenMP runtime that the kernels share

from kadence import _state

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11")
_COMPILE_SECONDS = 60

_log = logging.getLogger(__name__)


@functools.cache
def load(name: str, **defines: int) -> ctypes.CDLL | None:
    """The library of `name`.c compiled with `defines`; None where it cannot be had, for a reason that is logged."""
    openmp = _openmp()
    compiler = shutil.which("gcc") or shutil.which("cc")
    if openmp is None or compiler is None:
        _log.info("no native %s: %s", name, "no compiler" if compiler is None else "torch has no libgomp")
        return None
    try:
        library = _built(Path(__file__).with_name(f"{name}.c"), compiler, defines)
        # One OpenMP runtime a process: two would each keep threads that spin. Linked without, ours finds torch's.
        ctypes.CDLL(openmp, mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        _log.info("no native %s: %s", name, error.stderr.decode(errors="replace").strip().splitlines()[:1])
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.info("no native %s: %s", name, error)
    return None


def _built(source: Path, compiler: str, defines: dict[str, int]) -> Path:
    options = [*_FLAGS, *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    key = hashlib.sha256(text + repr((compiler, options, _processor())).encode()).hexdigest()[:16]
    folder = _state.home() / "kernels"
    target = folder / f"{source.stem}-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        part = Path(work) / "part.o"
        run = functools.partial(subprocess.run, check=True, capture_output=True, timeout=_COMPILE_SECONDS)
        run([compiler, *options, "-c", str(source), "-o", str(part)])
        run([compiler, "-shared", "-o", str(part.with_suffix(".so")), str(part)])
        os.replace(part.with_suffix(".so"), target)
    return target


def _openmp() -> str | None:
    """The OpenMP runtime that torch has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return next((line.split()[-1] for line in maps.splitlines() if "libgomp" in line), None)


def _processor() -> str:
    """What -march=native depends on; a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
