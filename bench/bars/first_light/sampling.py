"""Sampled answers depend on prompt, options and seed alone: the same ids for every K, every batch, twice.

In float32, where batch shapes do not move a token except in a near tie, which is judged as in exactness.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from bench.reference import Reference
from bench.ties import Law, judge
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient, GenerateResult
from services.model.fetch import resolve

MINUTES = 5
_PROMPTS, _TOKENS = 24, 32
LENGTHS = (0, 3, 7)
BATCHES = (24, 8, 1)
RUNS = 2
_TEMPERATURE, _TOP_P, _SEED = 0.8, 0.95, 1_000


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One bar per run: how many answers differ from those of the first, plain one."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    texts = bench.prompts.take(bench.rounds(_PROMPTS))
    values = {"model.dtype": "float32", "policy.name": f"fixed:{max(LENGTHS)}", "drafter.kind": "ngram"}
    first: list[GenerateResult] = []
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            for run in range(1, RUNS + 1):
                answers: dict[tuple[int, int], list[GenerateResult]] = {}
                for k in LENGTHS:
                    for batch in BATCHES:
                        done = await play(client, _requests(texts, k), at_once=batch)
                        answers[k, batch] = [answer.result for answer in done.answers]
                        bench.say(f"run {run}, K {k}, batch {batch}: {done.seconds:.1f} s")
                first = first or answers[LENGTHS[0], BATCHES[0]]
                yield _bar(reference, first, run, answers)


def _requests(texts: list[str], k: int) -> list[dict[str, Any]]:
    options = {"temperature": _TEMPERATURE, "top_p": _TOP_P, "max_tokens": _TOKENS, "max_draft_tokens": k}
    return [
        {"messages": [{"role": "user", "content": text}], "seed": _SEED + i, **options} for i, text in enumerate(texts)
    ]


def _bar(
    reference: Reference,
    first: list[GenerateResult],
    run: int,
    answers: dict[tuple[int, int], list[GenerateResult]],
) -> Bar:
    differences: list[dict[str, Any]] = []
    near = accepted = 0
    for (k, batch), results in answers.items():
        for number, (wanted, result) in enumerate(zip(first, results, strict=True)):
            accepted += result.stats.accepted
            law = Law(_TEMPERATURE, _TOP_P, wanted.seed)
            found = judge(reference, list(wanted.prompt_token_ids), list(result.token_ids), list(wanted.token_ids), law)
            if found is not None:
                near += found.near
                differences.append({"k": k, "batch": batch, "prompt": number, **vars(found)})
    distinct = len({result.token_ids for result in first})
    # Equal answers to different prompts, or no accepted draft, would put nothing to the test.
    of = len(first) * len(answers) if accepted and distinct > 1 else 0
    shapes = f"K {', '.join(map(str, LENGTHS))} x batch {', '.join(map(str, BATCHES))}"
    note = f"{shapes}; near ties {near}; {accepted} drafted tokens accepted"
    name = f"sampled answers unlike the first ones, run {run}"
    return Bar.count(name, len(differences) - near, of, note=note, samples={"differences": differences})
