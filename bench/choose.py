"""Which drafter answers fastest: checkpoints, draft vocabularies and draft lengths side by side against plain decoding.

python -m bench.choose --prompts DIR CHECKPOINT[,VOCABULARY] ...

One greedy stream at a time, every prompt through every drafter in turn. What a step costs depends on a drafter's shape
alone, so checkpoints that were trained too briefly to be used still say what a longer training must bring: the step's
time, as a multiple of plain decoding's, is the acceptance length below which a draft loses.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import drafter, stats
from bench.cluster import running
from bench.load import Answer, play
from bench.tasks import Prompts
from kadence import AsyncClient
from kadence.errors import KadenceError
from training.conversations import before_loop, spread

LENGTHS = (2, 3, 4, 5, 7)
_TOKENS = 96
_SHORTEST = 8  # tokens of an answer that says something


@dataclass
class Measured:
    """One drafter at one draft length, on one task: an entry a prompt."""

    seconds: list[float] = field(default_factory=list)
    """Median time of a step."""
    lengths: list[float] = field(default_factory=list)
    """Tokens of a step, on average."""
    rates: list[float] = field(default_factory=list)
    """Tokens per second behind the first."""

    def take(self, answer: Answer) -> None:
        """Adds an answer, up to its first loop."""
        kept = drafter.within(drafter.steps(answer), before_loop(answer.result.token_ids))
        times = [moment for moment, _ in answer.arrivals][: len(kept) + 1]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        self.seconds.append(stats.median(pauses).value)
        self.lengths.append(sum(kept) / len(kept))
        self.rates.append(sum(kept) / (times[-1] - times[0]))


async def measure(
    drafters: dict[str, dict[str, Any]], prompts: dict[str, list[str]], count: int
) -> list[dict[str, Any]]:
    """A row for each drafter, draft length and task. drafters: settings of a cluster by name."""
    clusters = {"plain": {"drafter.kind": "none", "policy.name": "off"}, **drafters}
    arms = [("plain", 0), *itertools.product(drafters, LENGTHS)]
    found = {(*arm, task): Measured() for arm in arms for task in prompts}
    async with AsyncExitStack() as stack:
        clients = {}
        for name, values in clusters.items():
            cluster = stack.enter_context(running("grpc", values))
            clients[name] = await stack.enter_async_context(AsyncClient(cluster.endpoint))
            await play(clients[name], [{"prompt": "Hello", "max_tokens": 16}])
        chosen = {task: spread(texts, count) for task, texts in prompts.items()}
        for number, task in itertools.product(range(count), chosen):
            for text, arm in itertools.product(chosen[task][number : number + 1], arms):
                answer = await _answer(clients[arm[0]], text, arm[1])
                if before_loop(answer.result.token_ids) >= _SHORTEST:
                    found[*arm, task].take(answer)
            print(f"prompt {number + 1} of {count}, {task}", file=sys.stderr, flush=True)
    return [_row(name, k, task, found) for name, k, task in found]


async def _answer(client: AsyncClient, text: str, k: int) -> Answer:
    request: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS}
    return (await play(client, [request | {"temperature": 0.0, "max_draft_tokens": k}])).answers[0]


def _row(name: str, k: int, task: str, found: dict[tuple[str, int, str], Measured]) -> dict[str, Any]:
    mine, plain = found[name, k, task], found["plain", 0, task]
    if not plain.rates:
        return {"drafter": name, "k": k, "task": task}
    cost, gain = stats.ratio(mine.seconds, plain.seconds), stats.ratio(mine.rates, plain.rates)
    return {
        "drafter": name,
        "k": k,
        "task": task,
        "acceptance_length": round(sum(mine.lengths) / len(mine.lengths), 3),
        "step_cost": round(cost.value, 3),
        "gain": round(gain.value, 3),
        "gain_low": round(gain.low, 3),
        "gain_high": round(gain.high, 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people: a line for each drafter and length, over all tasks, best first."""
    by_arm: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if "gain" in row:
            by_arm.setdefault((row["drafter"], row["k"]), []).append(row)
    lines = []
    for (name, k), some in by_arm.items():
        mean = math.exp(sum(math.log(row["gain"]) for row in some) / len(some))
        each = ", ".join(f"{row['task']} {row['gain']:.2f}x at {row['acceptance_length']:.2f}" for row in some)
        cost = sum(row["step_cost"] for row in some) / len(some)
        lines.append((mean, f"{mean:.2f}x  {name} k={k}: a step costs {cost:.2f} plain ones; {each}"))
    return "\n".join(line for _, line in sorted(lines, reverse=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.choose", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("drafters", nargs="+", metavar="CHECKPOINT[,VOCABULARY]", help="a folder; the draft vocabulary, else all ids")
    add("--prompts", type=Path, required=True, metavar="DIR", help="folder of .jsonl prompts, one file a task")
    add("--count", type=int, default=4, metavar="N", help="prompts of each task (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="where to write the rows as JSON")
    args = parser.parse_args()
    try:
        settings = {}
        for text in args.drafters:
            folder, _, vocabulary = text.partition(",")
            options = {"drafter.options.draft_vocabulary": int(vocabulary)} if vocabulary else {}
            checkpoint = drafter.found(Path(folder))
            assert checkpoint is not None
            settings[text] = drafter.settings(checkpoint) | options
        rows = asyncio.run(measure(settings, Prompts.read(args.prompts).by_task, args.count))
    except (KadenceError, ValueError) as error:
        print(f"bench.choose: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
