"""What a request's drafts bring: the same alone and among 16 others, in float32."""

from __future__ import annotations

from collections.abc import AsyncIterator

from bench import drafter
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from bench.reference import Reference
from bench.ties import judge
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient, GenerateResult
from services.model.fetch import resolve

MINUTES = 3
_STREAMS, _TOKENS = 17, 64


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Requests that accept otherwise, among those with the same answer; and answers that differ."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    requests = [
        {"prompt_token_ids": reference.prompt_ids(text), "max_tokens": _TOKENS, "ignore_eos": True}
        for text in bench.prompts.take(_STREAMS)
    ]
    alone: list[GenerateResult] = []
    # Without reuse: the second time a prompt comes, it is computed again, in another batch.
    values = drafter.settings(bench.checkpoint(), model__dtype="float32", verifier__prefix_caching=False)
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            together = [answer.result for answer in (await play(client, requests)).answers]
            bench.say(f"{len(together)} streams together")
            for request in requests[: bench.rounds(_STREAMS)]:
                alone += [answer.result for answer in (await play(client, [request])).answers]
    bench.say(f"{len(alone)} alone")
    differ = near = unlike = same = 0
    for one, among in zip(alone, together, strict=False):
        found = judge(reference, list(one.prompt_token_ids), list(one.token_ids), list(among.token_ids))
        differ += found is not None
        near += found is not None and found.near
        same += found is None
        unlike += found is None and _brought(one) != _brought(among)
    samples = {"alone": [_brought(one) for one in alone], "among others": [_brought(one) for one in together]}
    yield Bar.count("requests whose acceptance is another among others", unlike, same, samples=samples)
    yield Bar.count("answers that differ", differ - near, len(alone), note=f"near ties {near}")
    lengths = [one.stats.acceptance_length for one in together]
    yield Bar("acceptance length among others", sum(lengths) / len(lengths), note=f"mean of {len(lengths)} requests")


def _brought(result: GenerateResult) -> tuple[int, ...]:
    """Steps, drafted, verified, accepted, and the histogram of K."""
    told = result.stats
    return (told.steps, told.drafted, told.verified, told.accepted, *told.k_hist)
