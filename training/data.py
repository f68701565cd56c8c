"""Makes conversations for training a drafter: prompts, and the target's own answers to them, as token ids.

python -m training.data --prompts FILE.jsonl ... --model MODEL --out data.jsonl

A line {"job", "task", "prompt_ids", "response_ids", "lead", "temperature"} each, in an order that the arguments decide,
as they decide everything else (though bfloat16 rounds otherwise in other company, so that some near ties may fall
otherwise). A run that was stopped goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

from kadence.cluster import LLM
from kadence.errors import APIError, ConfigError, InvalidRequestError
from kadence.types import GenerateResult
from services.model.fetch import resolve
from services.scheduler.tokenizer import Tokenizer
from training.command import ended
from training.conversations import LONGEST, read_prompts
from training.jobs import Job, left, plan, shard

_TURN_TOKENS = 96
_KV_TOKENS = LONGEST + 128  # of a conversation, with room for drafts and half-filled pages
_EVERY = 100
_TRIES = 3


class Writer:
    """Has a cluster that runs make conversations; threads may share it."""

    def __init__(self, llm: LLM, tokenizer: Tokenizer, max_tokens: int) -> None:
        """max_tokens: of an answer, its lead included. Raises InvalidRequestError if there is no chat template."""
        self._llm, self._tokenizer, self._max_tokens = llm, tokenizer, max_tokens
        # What a user turn begins with: all that conversations of different turns share.
        marks = [tokenizer.encode_chat([("user", text)]) for text in ("A", "B")]
        self._header = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*marks, strict=False))]

    def line(self, job: Job) -> dict[str, Any]:
        """The conversation's line; without an answer where the turn is empty or endless, or the prompt too long."""
        line: dict[str, Any] = {"job": job.number, "task": job.label}
        text = job.prompt if job.whole else self._turn(job)
        if not text:
            return line
        prompt = self._tokenizer.encode_chat([("user", text)])
        room = min(self._max_tokens, LONGEST - len(prompt))
        if room < 2:
            return line
        lead, response = self._answer(prompt, room, job)
        return line | {
            "prompt_ids": prompt,
            "response_ids": response,
            "lead": lead,
            "temperature": job.temperature,
        }

    def _turn(self, job: Job) -> str:
        """A user turn, written by the target after its beginning; "" if it does not come to an end."""
        begin = " ".join(job.prompt.split(" ")[: job.words])
        ids = self._header + (self._tokenizer.encode_words([begin])[0] if begin else [])
        turn = self._run(ids, _TURN_TOKENS, 1.0, job.seed)
        return (begin + turn.text).strip() if turn.finish_reason == "stop" else ""

    def _answer(self, prompt: list[int], room: int, job: Job) -> tuple[int, list[int]]:
        """Tokens of the lead, and those of the whole answer, at most `room`."""
        lead: list[int] = []
        if job.lead:
            found = self._run(prompt, min(job.lead, room - 1), 1.0, job.seed)
            lead = list(found.token_ids)
            if found.finish_reason == "stop":
                return len(lead), lead
        rest = self._run(prompt + lead, room - len(lead), job.temperature, job.seed + 1)
        return len(lead), lead + list(rest.token_ids)

    def _run(self, ids: list[int], tokens: int, temperature: float, seed: int) -> GenerateResult:
        """One answer; asked for again if the cluster has lost it, as it may on a machine that was suspended."""
        for tries in range(1, _TRIES + 1):
            try:
                return self._llm.generate(ids, max_tokens=tokens, temperature=temperature, seed=seed)[0]
            except InvalidRequestError:
                raise
            except APIError:
                if tries == _TRIES:
                    raise
                time.sleep(tries)
        raise AssertionError("unreachable")


def write(jobs: list[Job], line: Callable[[Job], dict[str, Any]], out: TextIO, at_once: int) -> None:
    """Makes the lines of `jobs`, so many at a time, and writes them in the order of the jobs; reports progress."""
    begun, tokens = time.monotonic(), 0
    # Some wait before the cluster, so that it never waits for the threads.
    with ThreadPoolExecutor(at_once + 16) as pool:
        for number, made in enumerate(pool.map(line, jobs), 1):
            out.write(json.dumps(made, separators=(",", ":")) + "\n")
            out.flush()
            tokens += len(made.get("response_ids", ()))
            if number % _EVERY == 0 or number == len(jobs):
                gone = time.monotonic() - begun
                ahead = gone / number * (len(jobs) - number) / 60
                print(
                    f"{number} of {len(jobs)}, {tokens} tokens, {tokens / gone:.0f}/s, {ahead:.1f} min left", flush=True
                )


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    return ended(lambda: _make(args), "stopped; the same command goes on where it was")


def _make(args: argparse.Namespace) -> None:
    _check(args)
    folder = resolve(args.model)
    jobs = plan(read_prompts(args.prompts), args.answers, args.turns, args.temperature, args.seed)
    jobs = left(shard(jobs, args.shard), args.out)
    if not jobs:
        print(f"{args.out} is complete")
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with _cluster(args, folder) as llm, args.out.open("a", encoding="utf-8") as out:
        write(jobs, Writer(llm, Tokenizer.load(folder), args.max_tokens).line, out, args.at_once)


def _cluster(args: argparse.Namespace, folder: Path) -> LLM:
    verifier = {"max_num_seqs": args.at_once, "kv_tokens": args.at_once * _KV_TOKENS, "threads": args.threads}
    if args.drafter is None:
        return LLM(str(folder), drafter="none", policy="off", verifier=verifier)
    drafter = {"kind": "dflash2", "options": {"checkpoint": args.drafter, "draft_vocabulary": args.draft_vocabulary}}
    return LLM(str(folder), drafter=drafter, policy=args.policy, verifier=verifier)


def _check(args: argparse.Namespace) -> None:
    limits: Iterable[tuple[str, float, float]] = (
        ("answers", 0, float("inf")),
        ("turns", 0, float("inf")),
        ("temperature", 0, 100),
        ("max_tokens", 2, LONGEST),
        ("at_once", 1, 4096),
        ("draft_vocabulary", 0, float("inf")),
        ("threads", 0, 1024),
    )
    for name, least, most in limits:
        value = getattr(args, name)
        if not least <= value <= most:
            wanted = f"at least {least}" if most == float("inf") else f"{least} to {most}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; {wanted} is needed")


def _parser() -> argparse.ArgumentParser:
    about, default = (__doc__ or "").split("\n")[0], argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m training.data", description=about, formatter_class=default)
    add = parser.add_argument
    add("--prompts", type=Path, nargs="+", required=True, help='JSON lines {"task", "prompt"}; files, or their folders')
    add("--model", required=True, help="the target: a folder, or a name of `kadence models list`")
    add("--out", type=Path, required=True, help="JSON lines, appended to")
    add(
        "--answers", type=int, default=1, help="to each prompt; from the second on with a lead, sampled tokens to begin"
    )
    add("--turns", type=int, default=0, help="conversations whose prompt the target writes, after the beginning of one")
    add("--temperature", type=float, default=0.0, help="of the answers")
    add("--max-tokens", type=int, default=192, help="of an answer")
    add("--seed", type=int, default=0, help="of everything that is drawn")
    add("--shard", default="0/1", help="i/n: makes each n-th conversation from the i-th on, for n machines")
    add("--drafter", help="a DFlash 2 checkpoint, to draft with")
    add("--policy", default="fixed:7", help="with --drafter: fixed:K, drafts verified in a step; many at once want few")
    add("--draft-vocabulary", type=int, default=0, help="with --drafter: ids it scores, the most frequent; 0 is all")
    add("--at-once", type=int, default=128, help="answers made at a time")
    add("--threads", type=int, default=0, help="compute threads; 0 is one per core")
    return parser


if __name__ == "__main__":
    sys.exit(main())
