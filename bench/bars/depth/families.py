"""Tiny random models of every family and every kind of rope: greedy ids of three processes against `transformers`."""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.families import CASES, write
from bench.load import play
from bench.reference import Reference, Setting
from bench.ties import judge
from kadence import AsyncClient

MINUTES = 2
_PROMPTS, _TOKENS, _LONGEST = 24, 64, 400
_VOCABULARY = 256
LENGTHS = (0, 7)


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """One bar per model."""
    generator = random.Random(0)
    prompts = []
    for number in range(bench.rounds(_PROMPTS)):
        # Every other prompt repeats itself, for the drafter; lengths go past the context that ropes were scaled from.
        piece = [generator.randrange(_VOCABULARY) for _ in range(generator.randrange(4, _LONGEST))]
        prompts.append((piece[:40] * 8 if number % 2 else piece)[:_LONGEST])
    for name in CASES:
        with tempfile.TemporaryDirectory(prefix="kadence-family-") as folder:
            write(Path(folder), name)
            yield await _bar(bench, name, Path(folder), prompts)


async def _bar(bench: Bench, name: str, folder: Path, prompts: list[list[int]]) -> Bar:
    reference = Reference(folder)
    wanted = [reference.generate([ids], _TOKENS, Setting("float32"), False).ids[0] for ids in prompts]
    values = {
        "model.path": str(folder),
        "model.dtype": "float32",
        "policy.name": f"fixed:{max(LENGTHS)}",
        "drafter.kind": "ngram",
    }
    differ = near = accepted = 0
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            for k in LENGTHS:
                options = {"max_tokens": _TOKENS, "ignore_eos": True, "max_draft_tokens": k}
                done = await play(client, [{"prompt_token_ids": ids, **options} for ids in prompts])
                for prompt, answer, ids in zip(prompts, done.answers, wanted, strict=True):
                    accepted += answer.result.stats.accepted
                    found = judge(reference, prompt, list(answer.result.token_ids), ids)
                    differ += found is not None
                    near += found is not None and found.near
    bench.say(f"{name}: {differ} of {len(LENGTHS) * len(prompts)} differ")
    note = f"{len(prompts)} prompts, K {' and '.join(map(str, LENGTHS))}; near ties {near}; {accepted} drafts accepted"
    of = len(LENGTHS) * len(prompts) if accepted else 0
    return Bar.count(f"{name}: answers unlike generate()", differ - near, of, note=note)
