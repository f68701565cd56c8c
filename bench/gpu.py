"""Times the draft-verify cycle on one GPU with random weights: `python -m bench.gpu --out FILE`; needs torch alone.

The result is the schedule's cost curve: milliseconds of a step by shape, sequences and K. The measurement ends by
itself after `--seconds`; what there is by then has been written, and what failed is told beside it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from bench.device_clock import Clock
    from bench.random_models import Shape

ROOT = Path(__file__).resolve().parents[1]
SEQUENCES = (1, 8, 32, 64)
DRAFTED = (0, 3, 7)
SCHEMA = 1


@dataclass
class Run:
    """The result as it grows, and the time that is left."""

    out: Path
    deadline: float
    data: dict[str, Any]
    begun: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", flush=True)

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns; None, and a line in the result, if it fails or there is no time for it."""
        if time.monotonic() > self.deadline:
            self.data["skipped"].append(name)
            self.say(f"{name}: skipped, the time is up")
            return None
        start = time.monotonic()
        try:
            result = run()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            told = f"{type(error).__name__}: {str(error).strip()[:500]}"
            self.data["errors"].append({"part": name, "error": told, "where": where})
            self.say(f"{name}: failed at {where}: {told}")
            result = None
        else:
            self.say(f"{name}: {_line(result)} ({time.monotonic() - start:.1f} s)")
        self.save()
        return result

    def save(self) -> None:
        """Writes the result; whoever reads it meanwhile sees the old or the new one whole."""
        self.data["seconds"] = round(time.monotonic() - self.begun, 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.out)


def main(arguments: list[str] | None = None) -> int:
    """Measures; returns 0 if nothing failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    run = Run(options.out, time.monotonic() + options.seconds, _facts(device))
    _make_importable()
    from bench import gpu_parts
    from bench.device_clock import Clock
    from bench.random_models import SHAPES

    clock, rounds = Clock(device), options.rounds
    big = device.type == "cuda"
    size, side = (1024, 8192) if big else (4, 128)
    run.data["ceilings"] = run.part("ceilings", lambda: gpu_parts.ceilings(clock, size, side, rounds))
    # Graphs after all else, with the models built again: a capture that fails may leave the device in a bad state.
    for parts in [("steps", "attention"), ("graphs",)] if big else [("steps", "attention")]:
        for name in options.shapes:
            _shape(run, clock, SHAPES[name](), rounds, parts)
            gc.collect()
            clock.forget_peak()
    run.save()
    run.say(f"{options.out}: {len(run.data['errors'])} failed, {len(run.data['skipped'])} skipped")
    return 1 if run.data["errors"] else 0


def _shape(run: Run, clock: Clock, shape: Shape, rounds: int, parts: tuple[str, ...]) -> None:
    """These parts of one shape; its models are gone afterwards."""
    from bench import gpu_parts
    from bench.cycle import Models

    measures = {"steps": gpu_parts.step, "attention": gpu_parts.attention, "graphs": gpu_parts.passes}
    entry = run.data["shapes"].setdefault(shape.name, {"dtype": str(shape.dtype).removeprefix("torch.")})
    clock.forget_peak()
    build = partial(Models, shape, max(SEQUENCES), gpu_parts.most_steps(rounds), clock.device)
    models = run.part(f"{shape.name}: models", build)
    if models is None:
        return
    entry.update(target_bytes=models.target_bytes, drafter_bytes=models.drafter_bytes, models_gib=clock.peak_gib())
    for key in parts:
        entry[key] = []
        for sequences, k in _settings(DRAFTED[-1:] if key == "attention" else DRAFTED):
            name = f"{shape.name}: {key}, {sequences} sequences, K {k}"
            found = run.part(name, partial(measures[key], clock, models, sequences, k, rounds))
            entry[key] += [found] if found else []


def _settings(drafted: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return ((sequences, k) for sequences in SEQUENCES for k in drafted)


def _line(result: Any) -> str:
    """The numbers of a part, short."""
    parts = []
    for name, value in result.items() if isinstance(result, dict) else ():
        if name.endswith("_ms"):
            shown = value["median"] if isinstance(value, dict) else value
            parts.append(f"{name.removesuffix('_ms')} {shown:.3g} ms")
        elif name.endswith(("_error", "_per_s")):
            parts.append(f"{name} {value}")
    return ", ".join(parts) or "done"


def _make_importable() -> None:
    """Lets `kadence.errors` be imported where gRPC is not installed: without its client, the package is a folder."""
    try:
        importlib.import_module("kadence")
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == "kadence"]:
            del sys.modules[name]
        package = types.ModuleType("kadence")
        package.__path__ = [str(ROOT / "kadence")]
        sys.modules["kadence"] = package


def _facts(device: torch.device) -> dict[str, Any]:
    """What a result must carry to be compared with another."""
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device.type,
        "machine": _machine(),
        "sequences": SEQUENCES,
        "k": DRAFTED,
        "errors": [],
        "skipped": [],
        "shapes": {},
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": found.name,
            "gib": round(found.total_memory / 2**30, 1),
            "multiprocessors": found.multi_processor_count,
            "capability": [found.major, found.minor],
        }
    return facts


def _machine() -> dict[str, Any]:
    """Commit, versions and processor, where what tells them is installed."""
    try:
        from bench.machine import facts
    except ImportError:
        return {}
    return facts()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda if there is one; on a cpu it only shows that everything runs",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=("qwen3-8b", "dense-27b", "tiny"),
        help="default: tiny on a cpu, else the two others",
    )
    parser.add_argument("--seconds", type=float, default=280.0, help="no part begins later; default %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="timed repetitions; default %(default)s")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU")
    options.shapes = options.shapes or (["tiny"] if options.device == "cpu" else ["qwen3-8b", "dense-27b"])
    return options


if __name__ == "__main__":
    sys.exit(main())
