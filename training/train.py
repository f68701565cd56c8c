"""Trains a drafter on features of the target; a run that was stopped goes on where it last saved.

python -m training.train --kind dflash2 --features FOLDER --model MODEL --ranking FILE.json --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any

from kadence.errors import ConfigError
from services.model.fetch import resolve
from services.model.shipped import find_drafter
from training.command import add_machine, ended, machine
from training.examples import Cache
from training.recipe import Recipe
from training.trainer import Trainer

STATE = "state.pt"
LOG = "log.jsonl"


def run(trainer: Trainer, out: Path, every: int) -> None:
    """Trains to the recipe's last step; every so many steps looks at held-out examples, logs, saves and exports."""
    recipe, sums, took = trainer.recipe, dict[str, float](), 0
    if trainer.step == 0:
        _log(out, {"step": 0, "held_out": trainer.look()})
    begun, first = time.monotonic(), trainer.step
    while trainer.step < recipe.steps:
        for name, value in trainer.advance().items():
            sums[name] = sums.get(name, 0.0) + value
        took += 1
        if trainer.step % every and trainer.step < recipe.steps:
            continue
        gone, done = time.monotonic() - begun, trainer.step - first
        line = {
            "step": trainer.step,
            "conversations": trainer.examples[0],  # another number where a run went on with more features
            "learnt": {name: value / took for name, value in sums.items()},
            "held_out": trainer.look(),
            "blocks_per_second": done * recipe.batch * recipe.anchors / gone,
            "minutes_left": gone / done * (recipe.steps - trainer.step) / 60,
        }
        trainer.save(out / STATE)
        trainer.export(out)
        _log(out, line)
        sums, took = {}, 0


def _log(out: Path, line: dict[str, Any]) -> None:
    """Appends the numbers to the run's log, and prints them."""
    with (out / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    words = [f"step {line['step']}"]
    for part in ("learnt", "held_out"):
        if part in line:
            words.append(f"{part.replace('_', ' ')}: " + ", ".join(f"{k} {v:.3f}" for k, v in line[part].items()))
    if "minutes_left" in line:
        words.append(f"{line['blocks_per_second']:.0f} blocks/s, {line['minutes_left']:.0f} min left")
    print("; ".join(words), flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    stopped = f"stopped; the same command goes on from {args.out / STATE}, if there is one"
    return ended(lambda: _train(args), stopped)


def _train(args: argparse.Namespace) -> None:
    if args.every < 1:
        raise ConfigError(f"--every is {args.every}; at least 1 is needed")
    device = machine(args)
    recipe = Recipe(**{entry.name: getattr(args, entry.name) for entry in fields(Recipe)})
    trainer = Trainer(recipe, resolve(args.model), Cache(args.features), args.ranking, device)
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out / STATE
    if state.exists():
        trainer.load(state)
    else:
        trainer.begin(find_drafter(args.init) if args.init else None)
    (args.out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
    learn, held = trainer.examples
    print(f"{learn} conversations to learn from, {held} held out; step {trainer.step} of {recipe.steps}", flush=True)
    run(trainer, args.out, args.every)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__.split("\n")[0])
    parser.add_argument("--features", type=Path, required=True, help="what `python -m training.features` wrote")
    parser.add_argument("--model", required=True, help="the target: a folder, or a name of `kadence models list`")
    parser.add_argument("--ranking", type=Path, required=True, help="what `python -m training.vocabulary` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter, its state and its log")
    parser.add_argument("--init", help="a drafter to begin with, folder or name; what it lacks comes from the target")
    parser.add_argument("--every", type=int, default=200, help="steps between looks at held-out examples, with a save")
    add_machine(parser)
    for entry in fields(Recipe):
        name = "--" + entry.name.replace("_", "-")
        parser.add_argument(name, type=_reader(entry), default=entry.default, help=entry.metadata["help"])
    return parser


def _reader(entry: Field[Any]) -> Any:
    """How a field is read from the command line."""
    if isinstance(entry.default, tuple):
        return _numbers
    return _switch if isinstance(entry.default, bool) else type(entry.default)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r}; on or off")
    return text == "on"


if __name__ == "__main__":
    sys.exit(main())
