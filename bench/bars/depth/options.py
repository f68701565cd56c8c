"""Every sampling option alone, and 200 random combinations: the same ids at every K, the same log-probabilities.

In float32. A difference counts, unless it is a near tie of plain decoding, which is judged as in first light.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import torch

from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from bench.options import alone, combinations, is_plain
from bench.reference import Reference
from bench.ties import Law, judge
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient, GenerateResult
from services.model.fetch import resolve

MINUTES = 5
_COMBINATIONS, _TOKENS, _AT_ONCE = 200, 24, 32
_EACH = 3  # prompts for each single option
_SAMPLED = 12  # positions whose log-probabilities are compared with the reference's
_SEED = 7_000
LENGTHS = (0, 3, 7)


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Ids of single options, ids of combinations, log-probabilities between lengths and against the reference."""
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    texts = bench.prompts.take(48)
    ids = reference.prompt_ids("\n".join(texts))
    named = [single for single in alone(ids) for _ in range(_EACH)]
    singles = len(named)
    named += [(f"combination {i}", o) for i, o in enumerate(combinations(bench.rounds(_COMBINATIONS), ids))]
    requests = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS, "seed": _SEED + i, **options}
        for i, ((_, options), text) in enumerate(zip(named, itertools.cycle(texts), strict=False))
    ]
    values = {"model.dtype": "float32", "policy.name": f"fixed:{max(LENGTHS)}", "drafter.kind": "ngram"}
    answers: dict[int, list[list[GenerateResult]]] = {}
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            for k in LENGTHS:
                done = await play(client, [{**r, "max_draft_tokens": k} for r in requests], _AT_ONCE)
                answers[k] = [[answer.result, *answer.result.alternatives] for answer in done.answers]
                bench.say(f"K {k}: {len(requests)} requests in {done.seconds:.1f} s")
    yield _ids(reference, "single options", named, requests, answers, range(singles))
    yield _ids(reference, "random combinations", named, requests, answers, range(singles, len(named)))
    yield _between(answers)
    yield _against(reference, [result for results in answers[max(LENGTHS)] for result in results])


def _ids(
    reference: Reference,
    what: str,
    named: list[tuple[str, dict[str, Any]]],
    requests: list[dict[str, Any]],
    answers: dict[int, list[list[GenerateResult]]],
    chosen: range,
) -> Bar:
    """Answers with drafts against those without, in all that an answer is."""
    differences: list[dict[str, Any]] = []
    near = compared = accepted = 0
    for k, index in itertools.product(LENGTHS[1:], chosen):
        for plain, drafted in zip(answers[0][index], answers[k][index], strict=True):
            compared += 1
            accepted += drafted.stats.accepted
            if _told(plain) == _told(drafted):
                continue
            tie = is_plain(requests[index]) and _is_tie(reference, requests[index], plain, drafted)
            near += tie
            differences.append(
                {"k": k, "options": named[index], "near": tie, "ids": [plain.token_ids, drafted.token_ids]}
            )
    names = ", ".join(dict.fromkeys(d["options"][0] for d in differences if not d["near"]))
    lengths = ", ".join(map(str, LENGTHS[1:]))
    note = f"{len(chosen)} requests, K {lengths} against 0; near ties {near}; {accepted} drafted tokens accepted"
    note += f"; differ: {names}" if names else ""
    # Where no draft was ever accepted nothing was put to the test.
    of = compared if accepted else 0
    return Bar.count(
        f"{what}: answers that differ", len(differences) - near, of, note=note, samples={"differences": differences}
    )


def _told(result: GenerateResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.stop_match


def _is_tie(reference: Reference, request: dict[str, Any], plain: GenerateResult, drafted: GenerateResult) -> bool:
    law = Law(request.get("temperature", 0.0), request.get("top_p", 1.0), plain.seed)
    found = judge(reference, list(plain.prompt_token_ids), list(drafted.token_ids), list(plain.token_ids), law)
    return found is not None and found.near


def _between(answers: dict[int, list[list[GenerateResult]]]) -> Bar:
    """The largest difference of log-probabilities between lengths, where the text so far is the same."""
    largest, count = 0.0, 0
    for k in LENGTHS[1:]:
        pairs = zip(itertools.chain(*answers[0]), itertools.chain(*answers[k]), strict=True)
        for plain, drafted in pairs:
            for a, b in zip(plain.logprobs, drafted.logprobs, strict=False):
                if a.token_id != b.token_id:
                    break
                # By rank: equal ones may change places.
                ours, theirs = ([t.logprob, *(p for _, p in t.top)] for t in (a, b))
                largest = max([largest, *(abs(x - y) for x, y in zip(ours, theirs, strict=True))])
                count += len(ours)
    name, note = "log-probabilities between K, largest difference", f"{count} numbers compared, largest {largest:.1e}"
    return Bar(name, largest if count else None, "<=", 1e-4, note=note)


def _against(reference: Reference, results: list[GenerateResult]) -> Bar:
    """The largest difference from log-softmax of the reference's float64 logits, at some positions; told."""
    asked = [result for result in results if result.logprobs and result.logprobs[0].top]
    largest = 0.0
    for number, result in enumerate(asked[:: max(1, len(asked) // _SAMPLED)][:_SAMPLED]):
        at = number % len(result.logprobs)
        law = torch.log_softmax(reference.exact_logits([*result.prompt_token_ids, *result.token_ids[:at]]), -1)
        shown = result.logprobs[at]
        for token, logprob in ((shown.token_id, shown.logprob), *shown.top):
            largest = max(largest, abs(float(law[token]) - logprob))
    note = f"float32 against float64 at {min(len(asked), _SAMPLED)} positions, largest {largest:.1e}"
    return Bar("log-probabilities against the reference, largest difference", largest if asked else None, note=note)
