"""Imports point one way: kadence <- runtime, kernels, model <- services <- deploy, and some stay free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.shape.source_tree import PACKAGES, ROOT, Source, sources

SHARED = ("services.runtime", "services.kernels", "services.model")
# What a package may import of ours, besides itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kadence": (),
    "services.runtime": ("kadence",),
    "services.kernels": ("kadence",),
    "services.model": ("kadence", "services.runtime", "services.kernels"),
    "services.scheduler": ("kadence", *SHARED),
    "services.verifier": ("kadence", *SHARED),
    "services.drafter": ("kadence", *SHARED),
    "deploy": ("kadence", "services"),
    "training": ("kadence", "services"),
    "examples": ("kadence",),
    "bench": ("kadence", "services", "deploy", "training"),
    "tests": PACKAGES,
}
TORCH_FREE = ("kadence", "services.scheduler", "services.runtime", "deploy", "examples")
# Decisions: no clock, no RPC, no randomness of their own, no torch. Tested and replayed offline.
PURE = (
    "services/scheduler/admission.py",
    "services/scheduler/routing.py",
    "services/scheduler/validate.py",
    "kadence/_core.py",
    "kadence/_answer.py",
    "kadence/_exchange.py",
)
IMPURE = ("time", "random", "asyncio", "threading", "grpc", "torch", "os", "socket")


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def owner(name: str) -> str | None:
    """The package of ALLOWED that a module belongs to."""
    return next((package for package in ALLOWED if inside(name, package)), None)


@pytest.mark.parametrize("source", sources(), ids=lambda s: s.path)
def test_import_directions(source: Source) -> None:
    package = owner(source.module)
    if source.module == "services":
        return
    assert package, f"{source.path} belongs to no known package; add it to ALLOWED"
    wrong = []
    for line, name in source.imports:
        ours = any(inside(name, top) for top in PACKAGES)
        if ours and not any(inside(name, allowed) for allowed in (package, *ALLOWED[package])):
            wrong.append(f"{source.path}:{line} imports {name}")
        if any(inside(source.module, free) for free in TORCH_FREE) and inside(name, "torch"):
            wrong.append(f"{source.path}:{line} imports torch")
        if source.path in PURE and any(inside(name, module) for module in IMPURE):
            wrong.append(f"{source.path}:{line} is a decision and imports {name}")
    assert not wrong, "\n".join(wrong)


def test_one_place_dials() -> None:
    """Channels are opened in services/runtime/channels.py and in the SDK only, so options are set once."""
    allowed = ("services/runtime/channels.py", "kadence/", "tests/", "bench/")
    wrong = [
        s.path
        for s in sources()
        if not s.path.startswith(allowed) and ("insecure_channel(" in s.text or "secure_channel(" in s.text)
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["kadence", "kadence.cli", "services.scheduler.service", "services.drafter.service"])
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr or f"{module} imports torch"


def test_sdk_needs_only_its_own_requirements() -> None:
    """`import kadence` works without any package of the extras."""
    extras = ("torch", "ray", "transformers", "tokenizers", "numpy", "gguf", "prometheus_client", "grpc_health")
    code = f"import sys; sys.modules.update(dict.fromkeys({extras!r})); import kadence, kadence.cli"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
