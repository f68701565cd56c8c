"""How often bfloat16's other roundings in other batch shapes change an answer; told, since every engine has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from kadence import AsyncClient

MINUTES = 1
_PROMPTS, _TOKENS = 24, 48


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """The share of greedy answers that another K and batch leave alone, and where the others part."""
    texts = bench.prompts.take(bench.rounds(_PROMPTS))
    values = {"model.dtype": "bfloat16", "policy.name": "fixed:7", "drafter.kind": "ngram"}
    with running("inproc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            answers = []
            for k, at_once in ((0, 4), (7, 24)):
                requests = [
                    {"messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS, "max_draft_tokens": k}
                    for text in texts
                ]
                done = await play(client, requests, at_once)
                answers.append([answer.result.token_ids for answer in done.answers])
                bench.say(f"K {k}, batch {at_once}: {done.seconds:.1f} s")
    pairs = list(zip(*answers, strict=True))
    parted = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for a, b in pairs
        if a != b
    ]
    share = 1 - len(parted) / len(pairs)
    note = f"{len(pairs)} answers of at most {_TOKENS} tokens, K 0 at batch 4 against K 7 at batch 24"
    yield Bar("bfloat16 answers that stay the same", share, note=note, samples={"parted_at": parted})
