"""`python -m bench.bars`: measures the bars of a group, one line each; exit status 1 if any does not hold."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import drafter, machine, tasks
from bench.bars import groups, report, runner
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from kadence.errors import KadenceError

MINUTES = 120
_BUSY = 0.25  # cores in use by others that are told about
RESULTS = machine.ROOT / "bench" / "results" / "local"  # not in git


def main(argv: list[str] | None = None) -> int:
    """Runs the chosen bars; 0 if all hold, 1 if one does not, 2 if they could not be run, 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    runner.interrupt_once()
    try:
        chosen = groups.capabilities(arguments.only)
        prompts = tasks.Prompts.read(arguments.prompts)
        checkpoint = drafter.found(arguments.drafter)
    except KadenceError as error:
        print(f"kadence: {error}", file=sys.stderr)
        return 2
    run: dict[str, Any] = {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": arguments.quick,
        "prompts": {task: len(texts) for task, texts in prompts.by_task.items()},
        "drafter": checkpoint,
        "machine": machine.facts(),
        "seconds": {},
        "busy_cores": {},
    }
    about = sum(capability.minutes for capability in chosen)
    print(f"{len(chosen)} capabilities, about {about:.0f} minutes, at most {MINUTES}", file=sys.stderr, flush=True)
    bars: list[tuple[str, Bar]] = []
    try:
        given = Bench("", prompts, arguments.quick, time.monotonic(), checkpoint, arguments.features, arguments.start)
        _measure_all(chosen, given, run, bars)
    except KeyboardInterrupt:
        print("kadence: stopped", file=sys.stderr)
        return 130
    finally:
        name = f"{arguments.only.replace('/', '-') or 'all'}-{run['begun'].replace(':', '')}.json"
        out = arguments.out or RESULTS / name
        report.write(out, run, bars)
        print(f"everything measured is in {out}", file=sys.stderr, flush=True)
    print(report.last_line(bars) + (" (a try-out: too few samples to judge)" if arguments.quick else ""), flush=True)
    return 0 if all(bar.passed is not False for _, bar in bars) else 1


def _measure_all(
    chosen: list[groups.Capability], given: Bench, run: dict[str, Any], bars: list[tuple[str, Bar]]
) -> None:
    for capability in chosen:
        start = time.monotonic()
        bench = replace(given, name=capability.name)
        run["busy_cores"][capability.name] = busy = round(machine.busy(), 2)
        if busy > _BUSY:
            bench.say(f"others use {busy} cores of this machine: what is measured now is not worth much")
        for bar in runner.measure(capability, bench, given.begun + MINUTES * 60):
            bars.append((capability.name, bar))
            print(bar.line(f"{capability.name}/"), flush=True)
        run["seconds"][capability.name] = round(time.monotonic() - start, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.bars", description="Measures and judges.")
    known = ", ".join(groups.groups())
    parser.add_argument("--only", metavar="NAME", default="", help=f"a group ({known}) or group/capability; else all")
    parser.add_argument("--prompts", metavar="DIR", type=Path, default=tasks.OURS, help="folder of .jsonl prompts")
    ours = drafter.OURS.relative_to(machine.ROOT)
    parser.add_argument(
        "--drafter",
        metavar="DIR",
        type=Path,
        help=f"the drafter's checkpoint, for groups dflash2 and train; default: {ours} of this repository, if there",
    )
    parser.add_argument("--features", metavar="DIR", type=Path, help="what train/recipe trains on; left out without")
    parser.add_argument("--start", metavar="DIR", type=Path, help="the checkpoint that train/recipe begins with")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the JSON; bench/results/local without")
    parser.add_argument("--quick", action="store_true", help="few samples, to see that everything works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
