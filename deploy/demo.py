"""`make demo`: a cluster on local Ray answers three prompts at once, then plain decoding meets speculation."""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from deploy import cluster
from deploy.commands import progress, stop_on_sigterm
from deploy.config import load_plan
from deploy.placement import StartError
from kadence import AsyncClient, GenerateResult, Stats
from kadence.errors import KadenceError

# An open question, prose with set phrases, and markup: the more a text follows a form, the longer drafts are right.
PROMPTS = {
    "question": "Explain in three sentences why the sky is blue.",
    "letter": "Write a letter to a friend and invite her to a birthday party on Saturday.",
    "markup": "Write an HTML page with a table of three rows and three columns.",
}
MAX_TOKENS = 160
ROUNDS = 3
WIDTH = 96


@dataclass(frozen=True)
class Round:
    """All prompts at once, once: seconds, and the answers in the order of PROMPTS."""

    seconds: float
    answers: list[GenerateResult]

    @property
    def rate(self) -> float:
        """Tokens per second over all streams."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds

    @property
    def stats(self) -> Stats:
        """The answers' statistics, summed."""
        each = [answer.stats for answer in self.answers]
        return Stats(
            steps=sum(s.steps for s in each),
            verified=sum(s.verified for s in each),
            committed=sum(s.committed for s in each),
        )


class Printer:
    """Prints several growing texts as whole lines, each line with the name of its text."""

    def __init__(self) -> None:
        self._pending: dict[str, str] = {}

    def add(self, name: str, text: str) -> None:
        """Prints what completes a line; keeps the rest."""
        *lines, rest = (self._pending.get(name, "") + text).split("\n")
        while len(rest) > WIDTH:
            cut = rest.rfind(" ", 1, WIDTH)
            cut = cut if cut > 0 else WIDTH
            lines.append(rest[:cut])
            rest = rest[cut:].lstrip(" ")
        for line in lines:
            self._line(name, line)
        self._pending[name] = rest

    def end(self, name: str) -> None:
        """Prints what is left of a text."""
        if rest := self._pending.pop(name, ""):
            self._line(name, rest)

    def _line(self, name: str, line: str) -> None:
        print(f"{name:>8} │ {line}", flush=True)


async def show(client: AsyncClient) -> None:
    """The prompts at once, streamed."""
    printer = Printer()

    async def one(name: str, prompt: str) -> None:
        async with client.stream(messages=[{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS) as stream:
            async for chunk in stream:
                printer.add(name, chunk.text)
        printer.end(name)

    await asyncio.gather(*(one(name, prompt) for name, prompt in PROMPTS.items()))


async def once(client: AsyncClient, **options: Any) -> Round:
    """The prompts at once, timed."""
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.generate(messages=[{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS, **options)
            for prompt in PROMPTS.values()
        )
    )
    return Round(time.perf_counter() - begun, list(answers))


async def compare(client: AsyncClient) -> tuple[list[Round], list[Round]]:
    """Plain and speculative rounds in turn, so that both see the same machine."""
    plain, speculative = [], []
    for number in range(ROUNDS):
        print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        plain.append(await once(client, max_draft_tokens=0))
        speculative.append(await once(client))
    return plain, speculative


def table(plain: list[Round], speculative: list[Round]) -> str:
    """What was measured, as text; rates are medians over the rounds with their spread."""
    rows = [f"{'':24}{'tokens/s':>10}{'spread':>14}{'acceptance length':>20}{'mean K':>9}"]
    for name, rounds in (("plain decoding", plain), ("speculation", speculative)):
        rates = sorted(r.rate for r in rounds)
        stats = rounds[-1].stats
        length, mean_k = stats.acceptance_length, stats.verified / max(1, stats.steps)
        spread = f"{rates[0]:.0f}..{rates[-1]:.0f}"
        rows.append(f"{name:24}{statistics.median(rates):>10.1f}{spread:>14}{length:>20.2f}{mean_k:>9.2f}")
    for name, answer in zip(PROMPTS, speculative[-1].answers, strict=True):
        stats = answer.stats
        length, mean_k = stats.acceptance_length, stats.verified / max(1, stats.steps)
        rows.append(f"  {'of which ' + name:46}{length:>20.2f}{mean_k:>9.2f}")
    ratio = statistics.median(r.rate for r in speculative) / statistics.median(r.rate for r in plain)
    pairs = zip(plain[-1].answers, speculative[-1].answers, strict=True)
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    rows.append(f"\n{ratio:.2f} times as fast; {same} of {len(PROMPTS)} answers are the same token ids.")
    if same < len(PROMPTS):
        rows.append("In bfloat16 another batch shape rounds differently, in any engine; in float32 all are the same.")
    return "\n".join(rows)


async def session(endpoint: str) -> None:
    """Everything that happens on the running cluster."""
    async with AsyncClient(endpoint) as client:
        print(f"\nThree prompts at once, greedy, at most {MAX_TOKENS} tokens each:\n", flush=True)
        await show(client)
        print("\nThe same prompts, timed, plain and speculative in turn:", flush=True)
        print("\n" + table(*await compare(client)) + "\n", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; whatever happens, the cluster is down afterwards."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description="Shows a cluster at work.")
    parser.add_argument("--transport", choices=("ray", "grpc", "inproc"), default="ray")
    arguments = parser.parse_args(argv)
    stop_on_sigterm()
    say = progress()
    try:
        record = cluster.up(load_plan(None, {"cluster.transport": arguments.transport}), say)
        try:
            say(f"serving at {record['endpoint']}")
            asyncio.run(session(record["endpoint"]))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not stop the clean-up half-way
                signal.signal(number, signal.SIG_IGN)
            cluster.down(say)
            say("the cluster is down")
    except KeyboardInterrupt:
        print("kadence: stopped", file=sys.stderr)
        return 130
    except KadenceError as error:
        if isinstance(error, StartError) and error.log:
            print(error.log, file=sys.stderr)
        print(f"kadence: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
