"""The same checkpoint in the package dflash and in our cluster: the same acceptance in every step, the same text.

Float32, greedy, whole vocabulary, one request at a time. A block that the end of an answer cuts short is another block,
so both produce more than is compared.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import dflash.model
import torch
from dflash.model import DFlash2DraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from bench import drafter
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import play
from bench.reference import Reference
from bench.ties import judge
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient
from services.model.fetch import resolve

MINUTES = 4
_PROMPTS, _TOKENS, _MORE = 16, 96, 16


@dataclass(frozen=True)
class Told:
    """An answer's ids, and how many of them each step gave."""

    token_ids: list[int]
    lengths: list[int]


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Steps that accept otherwise, answers that differ, the acceptance length itself."""
    folder, target = bench.checkpoint(), resolve(DEFAULT_MODEL, allow_fetch=True)
    reference = Reference(target)
    prompts = [reference.prompt_ids(text) for text in bench.prompts.take(bench.rounds(_PROMPTS))]
    ours = await _ours(bench, folder, prompts)
    theirs = _theirs(bench, folder, target, prompts)
    differ = near = unlike = compared = 0
    for prompt, one, other in zip(prompts, ours, theirs, strict=True):
        found = judge(reference, prompt, one.token_ids[:_TOKENS], other.token_ids[:_TOKENS])
        differ += found is not None
        near += found is not None and found.near
        upto = _TOKENS if found is None else found.index
        mine, its = (drafter.within(told.lengths, upto) for told in (one, other))
        compared += max(len(mine), len(its))
        unlike += sum(a != b for a, b in zip(mine, its, strict=False)) + abs(len(mine) - len(its))
    note = f"float32, {len(prompts)} prompts, near ties {near}"
    yield Bar.count("answers unlike the package's", differ - near, len(prompts), note=note)
    samples = {"ours": [told.lengths for told in ours], "theirs": [told.lengths for told in theirs]}
    yield Bar.count("steps with another acceptance length", unlike, compared, samples=samples)
    for name, side in (("ours", ours), ("the package's", theirs)):
        lengths = [length for told in side for length in drafter.within(told.lengths, _TOKENS)]
        yield Bar(f"acceptance length, {name}", sum(lengths) / len(lengths), note=f"{len(lengths)} steps")


async def _ours(bench: Bench, folder: Path, prompts: list[list[int]]) -> list[Told]:
    told = []
    with running("grpc", drafter.settings(folder, model__dtype="float32")) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            for ids in prompts:
                request = {"prompt_token_ids": ids, "max_tokens": _TOKENS + _MORE, "ignore_eos": True}
                (answer,) = (await play(client, [request])).answers
                told.append(Told(list(answer.result.token_ids), drafter.steps(answer)))
    bench.say(f"ours: {sum(len(each.lengths) for each in told)} steps")
    return told


def _theirs(bench: Bench, folder: Path, target: Path, prompts: list[list[int]]) -> list[Told]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    draft = DFlash2DraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    told = []
    with (
        warnings.catch_warnings(action="ignore", category=FutureWarning),
        mock.patch.object(dflash.model, "_cuda_time", time.perf_counter),
    ):
        for ids in prompts:
            done = dflash_generate(
                draft, model, torch.tensor([ids]), _TOKENS + _MORE, stop_token_ids=None, return_stats=True
            )
            told.append(Told(done.output_ids[0, len(ids) :].tolist(), done.acceptance_lengths))
    bench.say(f"the package: {sum(len(each.lengths) for each in told)} steps")
    return told
