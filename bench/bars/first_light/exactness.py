"""Greedy answers of three processes in float32 against `transformers` generate() on the same weights.

Every combination of draft length and batch must give the reference's ids, also its chat template's, token for token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from bench.reference import Reference, Setting
from bench.ties import Difference, judge
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient, GenerateResult
from services.model.fetch import resolve

MINUTES = 5
_PROMPTS, _TOKENS = 24, 48
LENGTHS = (0, 3, 7)
BATCHES = (1, 8, 24)


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One bar for the prompts' ids, and one per draft length."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    texts = bench.prompts.take(bench.rounds(_PROMPTS))
    prompts = [reference.prompt_ids(text) for text in texts]
    expected = []
    for number, ids in enumerate(prompts, 1):
        expected.append(reference.generate([ids], _TOKENS, Setting("float32")).ids[0])
        if number % 8 == 0:
            bench.say(f"reference answers: {number} of {len(prompts)}")
    values = {"model.dtype": "float32", "policy.name": f"fixed:{max(LENGTHS)}", "drafter.kind": "ngram"}
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            results = {k: await _answers(bench, client, texts, k) for k in LENGTHS}
    every = [result for answers in results.values() for batch in answers.values() for result in batch]
    wanted = prompts * (len(LENGTHS) * len(BATCHES))
    wrong = sum(list(result.prompt_token_ids) != ids for result, ids in zip(every, wanted, strict=True))
    yield Bar.count("prompt ids unlike the reference's", wrong, len(every))
    for k, answers in results.items():
        yield _bar(reference, prompts, expected, k, answers)


async def _answers(bench: Bench, client: AsyncClient, texts: list[str], k: int) -> dict[int, list[GenerateResult]]:
    """Answers by batch: so many requests are under way at any time."""
    answers = {}
    for batch in BATCHES:
        requests: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": t}], "max_tokens": _TOKENS, "max_draft_tokens": k} for t in texts
        ]
        done = await play(client, requests, at_once=batch)
        answers[batch] = [answer.result for answer in done.answers]
        bench.say(f"K {k}, batch {batch}: {done.seconds:.1f} s")
    return answers


def _bar(
    reference: Reference,
    prompts: list[list[int]],
    expected: list[list[int]],
    k: int,
    answers: dict[int, list[GenerateResult]],
) -> Bar:
    differences: list[dict[str, Any]] = []
    near = 0
    for batch, results in answers.items():
        for number, (prompt, ids, result) in enumerate(zip(prompts, expected, results, strict=True)):
            found: Difference | None = judge(reference, prompt, list(result.token_ids), ids)
            if found is not None:
                near += found.near
                differences.append({"batch": batch, "prompt": number, **vars(found)})
    accepted = sum(result.stats.accepted for results in answers.values() for result in results)
    # Where no draft was ever accepted nothing was put to the test.
    of = len(prompts) * len(answers) if accepted or not k else 0
    shapes = f"{len(prompts)} prompts x batch {', '.join(map(str, answers))}"
    note = f"{shapes}; near ties {near}; {accepted} drafted tokens accepted"
    samples = {"differences": differences}
    name = f"answers unlike generate(), K {k}"
    return Bar.count(name, len(differences) - near, of, note=note, samples=samples)
