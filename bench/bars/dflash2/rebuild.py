"""What happens to a request's acceptance after a prefix hit, a drafter's death, and a change to other feature rows.

Float32, one request at a time; every step must accept what it does in a cluster where nothing happened and nothing is
reused. The drafter is a process that is killed and started again as it was, the second time with a checkpoint whose fc
is another: rows made for the first one, in pages that are kept and in a request that runs, must never be used.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from bench import drafter
from bench.bars.bar import Bar
from bench.bars.bench import Bench
from bench.cluster import running
from bench.load import Answer, play
from bench.reference import Reference
from deploy import processes
from deploy.config import DEFAULT_MODEL
from kadence import AsyncClient
from services.model.fetch import resolve

MINUTES = 4
_PROMPTS, _TOKENS = 8, 48
_LONG, _NEVER = 700, 3_000  # tokens of a long answer that is compared, and of one that is given up before its end
_BEFORE = 24  # chunks of the running request before the drafter is killed
_READY_SECONDS = 180
_WEIGHTS = "model.safetensors"


@dataclass
class Long:
    """A request that runs while things happen: its chunks so far, as tokens per step."""

    lengths: list[int] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, tokens: int) -> None:
        """One step more."""
        self.lengths.append(tokens)
        self.moved.set()

    async def until(self, wanted: Callable[[], bool]) -> None:
        """Waits for something in the chunks."""
        async with asyncio.timeout(_READY_SECONDS):
            while not wanted():
                self.moved.clear()
                await self.moved.wait()


async def measure(bench: Bench) -> AsyncIterator[Bar]:
    """Steps that accept otherwise, per event; drafts for a running request whose rows are another fc's."""
    folder = bench.checkpoint()
    reference = Reference(resolve(DEFAULT_MODEL, allow_fetch=True))
    texts = bench.prompts.take(bench.rounds(_PROMPTS))
    prompts = [reference.prompt_ids(f"{text}\n{after}") for text, after in zip(texts, texts[1:] + texts, strict=False)]
    with tempfile.TemporaryDirectory(prefix="kadence-bars-") as scratch:
        used, other = Path(scratch) / "used", Path(scratch) / "other"
        for copy in (used, other):
            shutil.copytree(folder, copy, copy_function=shutil.copyfile)
        _change_fc(other)
        fresh, fresh_long = await _fresh(folder, prompts, _LONG)
        fresh_other, _ = await _fresh(other, prompts, 0)
        bench.say("fresh clusters are measured")
        with running("grpc", drafter.settings(used, model__dtype="float32")) as cluster:
            async with AsyncClient(cluster.endpoint) as client:
                await _answers(client, prompts)
                hit = await _answers(client, prompts)
                yield _bar("after a prefix hit", hit, fresh)
                async with _running(client, prompts[0]) as long:
                    await long.until(lambda: len(long.lengths) >= _BEFORE)
                    killed_at = await _restart(client, Path(scratch) / "drafter.log", lambda: len(long.lengths))
                    await long.until(lambda: max(long.lengths[killed_at + 1 :], default=0) > 1)
                    await long.until(lambda: len(long.lengths) >= killed_at + 3 * _BEFORE)
                yield _running_bar(bench, long.lengths, killed_at + 1, fresh_long)
                yield _bar("after the drafter's death", await _answers(client, prompts), fresh)

                def change() -> int:
                    shutil.copyfile(other / _WEIGHTS, used / _WEIGHTS)
                    return len(long.lengths)

                async with _running(client, prompts[0]) as long:
                    await long.until(lambda: len(long.lengths) >= _BEFORE)
                    killed_at = await _restart(client, Path(scratch) / "drafter.log", change)
                    changed = await _answers(client, prompts)  # the drafter is there, beside the one that runs
                    assert any(answer.result.stats.drafted for answer in changed), "nothing was drafted"
                    seen = len(long.lengths)
                    await long.until(lambda: len(long.lengths) >= seen + _BEFORE)
                after = long.lengths[killed_at + 1 :]
                wrong = sum(length > 1 for length in after)
                yield Bar.count("steps with drafts from rows of another fc, running request", wrong, len(after))
                yield _bar("with another fc", await _answers(client, prompts), fresh_other)
    differ = sum(drafter.steps(a) != drafter.steps(b) for a, b in zip(fresh, fresh_other, strict=True))
    yield Bar("answers in which the other fc shows", float(differ), ">=", 1, unit=f"of {len(fresh)}")


def _bar(name: str, answers: list[Answer], fresh: list[Answer]) -> Bar:
    pairs = [(drafter.steps(a), drafter.steps(b)) for a, b in zip(answers, fresh, strict=True)]
    wrong = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=False))
    wrong += sum(abs(len(one) - len(other)) for one, other in pairs)
    cached = sum(answer.result.stats.cached_tokens for answer in answers)
    length = sum(map(sum, (one for one, _ in pairs))) / sum(len(one) for one, _ in pairs)
    note = f"acceptance length {length:.2f}; {cached} prompt tokens were not computed again"
    return Bar.count(
        f"steps with another acceptance {name}",
        wrong,
        sum(len(other) for _, other in pairs) if cached else 0,
        note=note,
        samples={"ours": [one for one, _ in pairs], "fresh": [other for _, other in pairs]},
    )


def _running_bar(bench: Bench, lengths: list[int], since: int, fresh: list[int]) -> Bar:
    """Compares steps that begin at the same place of the text, once the drafter is back."""
    first = next(i for i in range(since, len(lengths)) if lengths[i] > 1)
    bench.say(f"running request: {since} steps, {first - since} without the drafter, {len(lengths) - first} after")
    wanted = drafter.by_place(fresh)
    places = drafter.by_place(lengths)
    back = 1 + sum(lengths[:first])
    common = [place for place in places if place >= back and place in wanted]
    wrong = sum(places[place] != wanted[place] for place in common[:-1])  # the last one may have been cut short
    name = "steps with another acceptance after the drafter's death, running request"
    return Bar.count(name, wrong, max(0, len(common) - 1), samples={"ours": lengths, "fresh": fresh, "since": first})


async def _fresh(folder: Path, prompts: list[list[int]], long: int) -> tuple[list[Answer], list[int]]:
    """Answers where nothing is reused and nothing happens, and the steps of one of `long` tokens."""
    values = drafter.settings(folder, model__dtype="float32", verifier__prefix_caching=False)
    with running("grpc", values) as cluster:
        async with AsyncClient(cluster.endpoint) as client:
            answers = await _answers(client, prompts)
            if not long:
                return answers, []
            (answer,) = (await play(client, [_request(prompts[0], long)])).answers
            return answers, drafter.steps(answer)


async def _answers(client: AsyncClient, prompts: list[list[int]]) -> list[Answer]:
    """One request at a time."""
    return [answer for ids in prompts for answer in (await play(client, [_request(ids, _TOKENS)])).answers]


def _request(ids: list[int], tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "max_tokens": tokens, "ignore_eos": True, "timeout": 900.0}


@asynccontextmanager
async def _running(client: AsyncClient, ids: list[int]) -> AsyncIterator[Long]:
    """A long request in the background; it is given up at the end of the block."""
    long = Long()

    async def read() -> None:
        async with client.stream(**_request(ids, _NEVER)) as stream:
            first = True
            async for chunk in stream:
                if not first and chunk.token_ids:
                    long.add(len(chunk.token_ids))
                first = False

    reading = asyncio.create_task(read())
    try:
        yield long
        assert not reading.done(), "the long request ended too early"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _restart(client: AsyncClient, log: Path, meanwhile: Callable[[], int]) -> int:
    """Kills the drafter, does `meanwhile`, starts it again as it was; what `meanwhile` gave once it is ready."""
    (pid,) = await _drafters(client)
    process = psutil.Process(pid)
    command, env = process.cmdline(), process.environ()
    process.kill()
    for _ in range(500):
        if processes.started(pid) is None:
            break
        await asyncio.sleep(0.01)
    given = meanwhile()
    processes.spawn(command, log, env)
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            if await _drafters(client) - {pid}:
                break
            await asyncio.sleep(0.2)
    await asyncio.sleep(1)  # the verifier connects
    return given


async def _drafters(client: AsyncClient) -> set[int]:
    """Process ids of those that are ready; one that died is listed as lost."""
    replicas = (await client.status()).replicas
    return {replica.pid for replica in replicas if replica.kind == "drafter" and replica.state == "ready"}


def _change_fc(folder: Path) -> None:
    """Another fc of the same shape, not so far away that nothing is accepted any more."""
    tensors = load_file(folder / _WEIGHTS)
    fc = tensors["fc.weight"].float()
    noise = torch.randn(fc.shape, generator=torch.Generator().manual_seed(0))
    tensors["fc.weight"] = (fc + 0.5 * fc.std() * noise).to(tensors["fc.weight"].dtype)
    save_file(tensors, folder / _WEIGHTS)
