"""A prompt that begins as an earlier one did: what of it is computed again, and whether the answer stays the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from bench import stats
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import metric, running
from bench.load import Answer, play
from bench.reference import Reference
from bench.ties import judge
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient
from services.model.fetch import resolve

MINUTES = 2
_PAIRS, _PREFIX, _TAIL, _TOKENS = 8, 640, 24, 24
_STRIDE = 101  # prefixes of different pairs share no first page
_COMPUTED = "kadence_prompt_tokens_total"


@dataclass(frozen=True)
class Ask:
    """One answer, with the prompt tokens that the verifier computed for it."""

    answer: Answer
    computed: int

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.answer.arrivals[0][0]

    @property
    def spared(self) -> int:
        """Prompt tokens that were not computed."""
        return len(self.answer.result.prompt_token_ids) - self.computed


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Work spared, the same as reported in the answer, ids against a cluster without reuse, time to first token."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    prompts = _prompts(reference.prompt_ids("\n".join(bench.prompts.take(48))), bench.rounds(_PAIRS))
    reusing, plain = await _answers(bench, prompts, True), await _answers(bench, prompts, False)
    seconds = reusing[1::2]
    shares = [ask.spared / _PREFIX for ask in seconds]
    note = f"prefill of the second of {len(seconds)} pairs, prefix {_PREFIX} of {_PREFIX + _TAIL} tokens, by the metric"
    name = "share of a shared prefix not computed again"
    yield Bar(name, min(shares), ">=", 0.9, note=note, samples={"shares": shares})
    wrong = sum(ask.answer.result.stats.cached_tokens != ask.spared for ask in reusing)
    yield Bar.count("answers that report other cached tokens", wrong, len(reusing))
    differ = near = 0
    for ask, other in zip(reusing, plain, strict=True):
        ours, theirs = ask.answer.result, other.answer.result
        found = judge(reference, list(ours.prompt_token_ids), list(ours.token_ids), list(theirs.token_ids))
        differ += found is not None
        near += found is not None and found.near
    reused = sum(ask.spared for ask in plain)
    note = f"float32, near ties {near}; without reuse {reused} tokens were spared"
    yield Bar.count("answers unlike those without reuse", differ - near, len(plain) if not reused else 0, note=note)
    times = [ask.first for ask in seconds], [ask.first for ask in reusing[0::2]]
    a, b = (1000 * stats.median(each).value for each in times)
    yield Bar.of(
        "time to first token, second to first",
        stats.ratio(*times),
        "<=",
        None,
        unit="x",
        note=f"{a:.0f} ms and {b:.0f} ms",
    )


def _prompts(ids: list[int], pairs: int) -> list[list[int]]:
    """Two prompts of the same beginning, one after the other."""
    endless = ids * 4
    prompts = []
    for pair in range(pairs):
        prefix = endless[pair * _STRIDE :][:_PREFIX]
        prompts += [prefix + endless[_PREFIX + 2 * pair * _STRIDE + n * _TAIL :][:_TAIL] for n in (1, 2)]
    return prompts


async def _answers(bench: Bench, prompts: list[list[int]], reuse: bool) -> list[Ask]:
    """One request at a time."""
    values: dict[str, Any] = {"model.dtype": "float32", "drafter.kind": "ngram", "verifier.prefix_caching": reuse}
    asks = []
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            await play(client, [{"prompt": "Hello", "max_tokens": 8}])
            status = await client.status()
            before = metric(status, "verifier", _COMPUTED)
            for ids in prompts:
                done = await play(client, [{"prompt_token_ids": ids, "max_tokens": _TOKENS, "ignore_eos": True}])
                after = metric(status, "verifier", _COMPUTED)
                asks.append(Ask(done.answers[0], round(after - before)))
                before = after
    bench.say(f"{len(asks)} requests {'with' if reuse else 'without'} reuse: {sum(a.computed for a in asks)} tokens")
    return asks
