"""Measures a drafter: acceptance lengths as it is served, and what its drafts hold, over known answers.

python -m training.evaluate --drafter FOLDER --model MODEL --prompts FOLDER --out evaluation.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from kadence.cluster import LLM
from kadence.errors import ConfigError
from services.drafter.draft_arch import read_draft_arch
from services.model.dtypes import resolve_dtype
from services.model.fetch import resolve
from services.model.shipped import find_drafter
from services.verifier.target import Target
from training.acceptance import Acceptance, measure
from training.command import ended
from training.conversations import LONGEST, Conversation, read_prompts, spread
from training.features import Extractor
from training.offline import PATHS, Drafter, without_selector

Row = dict[str, Any]
_PATIENCE = 30  # seconds a step waits for its draft: the machine's load decides nothing


def cluster(model: Path, drafter: Path | None, drafts: int, vocabulary: int = 0, threads: int = 0) -> LLM:
    """The model served with a drafter's checkpoint, or with n-grams where it is None; whole blocks are verified."""
    config: dict[str, Any] = {"kind": "ngram"}
    if drafter is not None:
        options = {"checkpoint": str(drafter), "draft_vocabulary": vocabulary, "threads": threads}
        config = {"kind": read_draft_arch(drafter).kind, "options": options}
    verifier = {"draft_deadline_seconds": _PATIENCE, "threads": threads}
    return LLM(str(model), drafter=config, policy=f"fixed:{drafts}", verifier=verifier)


def laws(temperatures: Sequence[float]) -> Iterator[tuple[float, Literal["match", "ratio"]]]:
    """Temperature and rule of what is measured: where tokens are drawn, either rule."""
    for temperature in temperatures:
        yield temperature, "match"
        if temperature:
            yield temperature, "ratio"


def serve(
    llm: LLM, name: str, prompts: dict[str, list[str]], temperatures: Sequence[float], drafts: int, seed: int
) -> Iterator[tuple[Row, Acceptance]]:
    """One row per law and task, and what it was made of."""
    for temperature, rule in laws(temperatures):
        for task, texts in prompts.items():
            found = measure(llm, texts, temperature=temperature, max_draft_tokens=drafts, rule=rule, seed=seed)
            row = {"drafter": name, "task": task, "temperature": temperature, "rule": rule} | summary(found)
            print(f"{name}, {task}, T {temperature:g}, {rule}: {found.pooled:.3f}", file=sys.stderr, flush=True)
            yield row, found


def summary(found: Acceptance) -> Row:
    """The numbers of an acceptance length, for JSON; two digits more than they are worth."""
    lengths = found.lengths
    return {
        "requests": len(lengths),
        "tokens": found.tokens,
        "steps": found.steps,
        "acceptance_length": round(found.pooled, 4),
        "interval_90": [round(end, 4) for end in found.interval],
        "per_request": round(sum(lengths) / len(lengths), 4) if lengths else 0.0,
        "excluded": round(found.excluded, 4),
    }


def offline(drafter: Drafter, model: Path, answers: dict[str, Acceptance]) -> dict[str, Row]:
    """By task: what the drafter holds, over the target's own answers."""
    extract = Extractor(Target(model, "auto"), drafter.taps)
    found = {}
    for task, acceptance in answers.items():
        known = [Conversation(a.prompt_ids, a.token_ids[: a.kept]) for a in acceptance.answers]
        known = [Conversation(c.prompt, c.response[: max(0, LONGEST - len(c.prompt))]) for c in known]
        if known := [conversation for conversation in known if len(conversation.response) > 1]:
            found[task] = asdict(drafter.over(extract(known)))
    return found


def evaluate(args: argparse.Namespace) -> Row:
    """Everything that is measured, as the file holds it."""
    model, folder = resolve(args.model), find_drafter(args.drafter)
    arch, over_answers = read_draft_arch(folder), Drafter(folder, model, args.vocabulary, resolve_dtype("auto"))
    prompts: dict[str, list[str]] = {}
    for task, text in read_prompts(args.prompts):
        prompts.setdefault(task, []).append(text)
    prompts = {task: spread(texts, args.count) for task, texts in prompts.items()}
    drafts, rows = arch.max_draft_tokens, list[Row]()
    answers: dict[str, Acceptance] = {}
    with tempfile.TemporaryDirectory() as scratch:
        drafters: dict[str, Path | None] = {arch.kind: folder}
        if arch.selector_rank:
            drafters["without selector"] = without_selector(folder, Path(scratch) / "bare")
        for name, path in (drafters | {"ngram": None}).items():
            with cluster(model, path, drafts, args.vocabulary, args.threads) as llm:
                for row, found in serve(llm, name, prompts, args.temperatures, drafts, args.seed):
                    rows.append(row)
                    if name == arch.kind and not row["temperature"]:
                        answers[row["task"]] = found
    return {
        "model": model.name,
        "draft_tokens": drafts,
        "draft_vocabulary": args.vocabulary,
        "seed": args.seed,
        "served": rows,
        "offline": offline(over_answers, model, answers),
    }


def tables(found: Row) -> str:
    """The result as Markdown."""
    tasks = list(dict.fromkeys(row["task"] for row in found["served"]))
    lines = [_line("drafter", "T", "rule", *tasks), _line(*["---"] * (3 + len(tasks)))]
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in found["served"]:
        low, high = row["interval_90"]
        text = (
            f"{row['acceptance_length']:.2f} ({low:.2f}..{high:.2f}; {row['per_request']:.2f}; {row['excluded']:.0%})"
        )
        cells.setdefault((row["drafter"], f"{row['temperature']:g}", row["rule"]), {})[row["task"]] = text
    lines += [_line(*law, *(by_task[task] for task in tasks)) for law, by_task in cells.items()]
    lines += ["", "Pooled (90 % interval; mean of requests; share of tokens left out in loops).", ""]
    lines += [_line("over greedy answers", "task", "length", "right by position"), _line(*["---"] * 4)]
    for path in PATHS:
        for task, part in found["offline"].items():
            recall = " ".join(f"{share:.2f}" for share in part["recall"][path])
            lines.append(_line(path, task, f"{part['length'][path]:.2f}", recall))
    for task, part in found["offline"].items():
        lines.append(_line("attention inside the block", task, "", " ".join(f"{x:.2f}" for x in part["own"])))
    return "\n".join(lines)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    return ended(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    if 0.0 not in args.temperatures:
        raise ConfigError(f"--temperatures are {args.temperatures}; 0 is needed among them, for known answers")
    if args.count < 1:
        raise ConfigError(f"--count is {args.count}; at least 1 is needed")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = evaluate(args)
    print(tables(found))  # first, as measuring takes long, and writing may fail
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--drafter", required=True, help="a drafter that was trained here: its folder, or a shipped one's name"
    )
    parser.add_argument("--model", required=True, help="the target: a folder, or a name of `kadence models list`")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", required=True, help='files, or folders, of {"task", "prompt"} lines'
    )
    parser.add_argument("--count", type=int, default=20, help="prompts of each task, evenly spread")
    parser.add_argument("--temperatures", type=_numbers, default=[0.0, 1.0], help="0 must be among them: 0,1")
    parser.add_argument("--vocabulary", type=int, default=8192, help="most frequent ids that are drafted")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0 is one per core")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    return parser


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
