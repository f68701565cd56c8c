"""Makes conversations for training a drafter: prompts, and the target's own answers to them, as token ids.

python -m training.data --prompts FILE.jsonl ... --model MODEL --out data.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kadence.cluster import LLM
from kadence.errors import InvalidRequestError
from services.model.fetch import resolve
from services.scheduler.tokenizer import Tokenizer

_TURN_TOKENS = 96
_AT_ONCE = 128


@dataclass(frozen=True)
class Job:
    """One conversation to make.

    A prompt that is not `whole` is a user turn of which the target keeps only the beginning, `words` words, and writes
    the rest. The answer's first `lead` tokens are sampled at temperature 1, the rest is drawn at `temperature`.
    """

    number: int
    task: str
    prompt: str
    whole: bool
    words: int
    lead: int
    temperature: float
    seed: int


def plan(prompts: list[tuple[str, str]], answers: int, turns: int, temperature: float, seed: int) -> list[Job]:
    """`answers` jobs for each prompt, (task, text), the first without a lead, and `turns` that begin like one of them.

    In an order drawn by `seed`, as everything else is, so that any first part of it is a fair sample.
    """
    draw = random.Random(seed)
    found: list[tuple[str, str, bool, int, int]] = []
    for task, text in prompts:
        for answer in range(answers):
            found.append((task, text, True, 0, 0 if answer == 0 else draw.randint(1, 48)))
    for _ in range(turns):
        task, text = draw.choice(prompts)
        found.append((task, text, False, draw.choice((0, 1, 2, 3, 4, 6, 8)), 0))
    draw.shuffle(found)
    return [Job(number, *job, temperature, draw.getrandbits(31)) for number, job in enumerate(found)]


class Writer:
    """Answers jobs with a running cluster and appends them to a file, in any order."""

    def __init__(self, llm: LLM, tokenizer: Tokenizer, out: Any, max_tokens: int) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._out = out
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self.tokens = 0
        marks = [tokenizer.encode_chat([("user", text)]) for text in ("A", "B")]
        self._opening = next(i for i, (a, b) in enumerate(zip(*marks, strict=True)) if a != b)
        self._header = marks[0][: self._opening]

    def write(self, job: Job) -> None:
        """Makes one conversation and appends its line; an empty turn or one too long gives a line without answer."""
        text = job.prompt if job.whole else self._turn(job)
        line: dict[str, Any] = {"job": job.number, "task": job.task if job.whole else f"{job.task}-like"}
        if text:
            try:
                line |= self._answer(self._tokenizer.encode_chat([("user", text)]), job)
            except InvalidRequestError as error:
                print(f"job {job.number} left out: {error}", file=sys.stderr)
        with self._lock:
            self.tokens += len(line.get("response_ids", ()))
            self._out.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._out.flush()

    def _turn(self, job: Job) -> str:
        begin = " ".join(job.prompt.split(" ")[: job.words])
        ids = self._header + (self._tokenizer.encode_words([begin])[0] if begin else [])
        turn = self._run(ids, _TURN_TOKENS, 1.0, job.seed)
        return (begin + turn.text).strip() if turn.finish_reason == "stop" else ""

    def _answer(self, prompt: list[int], job: Job) -> dict[str, Any]:
        lead: list[int] = []
        if job.lead:
            found = self._run(prompt, job.lead, 1.0, job.seed)
            lead = list(found.token_ids)
            if found.finish_reason == "stop":
                return {"prompt_ids": prompt, "response_ids": lead, "lead": len(lead), "temperature": job.temperature}
        rest = self._run(prompt + lead, self._max_tokens - len(lead), job.temperature, job.seed + 1)
        response = lead + list(rest.token_ids)
        return {"prompt_ids": prompt, "response_ids": response, "lead": len(lead), "temperature": job.temperature}

    def _run(self, ids: list[int], tokens: int, temperature: float, seed: int) -> Any:
        return self._llm.generate(ids, max_tokens=tokens, temperature=temperature, seed=seed)[0]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m training.data", description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    folder = resolve(args.model)
    prompts = [
        (row["task"], row["prompt"])
        for path in args.prompts
        for row in map(json.loads, filter(None, path.read_text(encoding="utf-8").split("\n")))
    ]
    part, parts = map(int, args.shard.split("/"))
    done = set()
    if args.out.exists():
        done = {json.loads(line)["job"] for line in args.out.open()}
    jobs = [
        job
        for job in plan(prompts, args.answers, args.turns, args.temperature, args.seed)
        if job.number % parts == part and job.number not in done
    ]
    verifier = {"max_num_seqs": _AT_ONCE, "kv_tokens": _AT_ONCE * 640, "threads": args.threads}
    with args.out.open("a") as out, LLM(str(folder), drafter="none", policy="off", verifier=verifier) as llm:
        writer = Writer(llm, Tokenizer.load(folder), out, args.max_tokens)
        start = time.monotonic()
        with ThreadPoolExecutor(_AT_ONCE + 16) as pool:
            for number, _ in enumerate(pool.map(writer.write, jobs), 1):
                if number % 100 == 0:
                    gone = time.monotonic() - start
                    left = gone / number * (len(jobs) - number)
                    print(
                        f"{number}/{len(jobs)}, {writer.tokens / gone:.0f} tokens/s, {left / 60:.1f} min left",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
