"""A real verifier over loopback gRPC and in process: what a scheduler may rely on."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kadence.errors import UnavailableError
from kadence.internal import control_pb2, verifier_pb2_grpc
from kadence.internal import verifier_pb2 as pb
from kadence.v1 import types_pb2
from services.runtime.channels import connect
from tests.contract.fake_scheduler import Answer, FakeScheduler, serving
from tests.support.decoding import Verifier, client, running
from tests.support.scheduling import until
from tests.support.tiny_llama import TinyLlama

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = 1500


@pytest.fixture(params=["grpc", "inproc"])
async def verifier(request: pytest.FixtureRequest, tiny_llama: TinyLlama) -> AsyncIterator[Verifier]:
    async with running(request.param, tiny_llama.folder) as it:
        yield it
        await it.check_empty()


async def test_describe(verifier: Verifier) -> None:
    async with connect(verifier_pb2_grpc.VerifierServiceStub, verifier.address) as stub:
        it = (await stub.DescribeVerifier(pb.DescribeVerifierRequest(), timeout=5)).verifier
    assert (it.kind, it.model, it.vocab_size, it.max_sessions, it.max_rows) == ("verifier", "tiny-llama", 330, 4, 64)
    assert it.max_model_len == 4096 and it.max_message_bytes >= 16 << 20
    assert it.replica_id and it.version and len(it.model_fingerprint) == 32


async def test_decodes_a_batch(verifier: Verifier, tiny_llama: TinyLlama) -> None:
    """More requests than seats; ids equal generate(); one message a step carries all that moved."""
    prompts = {str(i): [(7 * i + j) % 330 for j in range(1 + 5 * i)] for i in range(7)}
    wanted = {name: tiny_llama.generate(prompt, 12) for name, prompt in prompts.items()}
    stops = {"2": wanted["2"][4], "5": wanted["5"][0]}
    async with client(verifier) as it:
        for name, prompt in prompts.items():
            it.submit(name, prompt, 12, stop_token_ids=[stops[name]] if name in stops else [])
        await it.ended(*prompts)
        ends = {name: ids.index(stops[name]) + 1 if name in stops else 12 for name, ids in wanted.items()}
        for name, prompt in prompts.items():
            end = ends[name]
            tiny_llama.assert_same(prompt, it.of(name).tokens, wanted[name][:end])
            it.of(name).check("STOP" if name in stops else "LENGTH", len(prompt))
            assert it.of(name).terminals[0].stop_token_id == stops.get(name, -1)
            assert [u.decode_step for u in it.of(name).updates] == [False] + [True] * (end - 1)
        steps = [response.step for response in it.responses]
        assert steps == sorted(set(steps)) and steps[0] >= 1
        assert max(len(response.updates) for response in it.responses) == 4
    assert await verifier.metric("kadence_prompt_tokens_total") == sum(map(len, prompts.values()))
    assert await verifier.metric("kadence_generation_tokens_total") == sum(ends.values())
    assert await verifier.metric("kadence_num_requests_running") == 0
    assert await verifier.metric('kadence_kv_pages{state="used"}') == 0


async def test_tells_what_was_cached(verifier: Verifier, tiny_llama: TinyLlama) -> None:
    """With the first token, of the prompt only; the metrics count as vLLM's."""
    prompt = [(11 * i) % 330 for i in range(50)]
    wanted = tiny_llama.generate(prompt, 20)
    async with client(verifier) as it:
        it.submit("a", prompt, 20)
        await it.ended("a")
        it.submit("b", prompt, 20)
        it.submit("c", prompt, 20, committed=wanted[:19])
        await it.ended("b", "c")
        for name, cached in (("a", 0), ("b", 48), ("c", 50)):  # c found 64 tokens
            assert [update.cached_tokens for update in it.of(name).updates if update.cached_tokens] == [cached] * (
                cached > 0
            )
            tiny_llama.assert_same(prompt, it.of(name).tokens, wanted[19 if name == "c" else 0 :])
        assert it.of("b").updates[0].cached_tokens == 48
    assert await verifier.metric("kadence_prefix_cache_queries_total") == 50 + 50 + 69
    assert await verifier.metric("kadence_prefix_cache_hits_total") == 48 + 64
    assert await verifier.metric("kadence_prompt_tokens_total") == 50 + 2 + 0
    assert await verifier.metric("kadence_kv_cache_usage_perc") == 0


async def test_the_same_seed_says_the_same(verifier: Verifier) -> None:
    async with client(verifier) as it:
        for name, seed in (("a", 2**64 - 1), ("b", 2**64 - 1), ("c", 1)):
            it.submit(name, PROMPT, 20, temperature=1.0, seed=seed)
        await it.ended("a", "b", "c")
        assert it.of("a").tokens == it.of("b").tokens != it.of("c").tokens


async def test_stops(verifier: Verifier) -> None:
    """Of running and waiting requests, twice, of strangers, and of another attempt."""
    verifier.throttle(0.003)
    names = [str(i) for i in range(6)]
    async with client(verifier) as it:
        for name in names:
            it.submit(name, PROMPT, LONG)
        await until(lambda: all(it.of(name).tokens for name in names[:4]))
        it.stop("0", attempt=1)
        for name in ("0", "0", "5", "nobody"):
            it.stop(name)
        await it.ended("0", "5")
        length = len(it.of("0").tokens)
        it.of("0").check("CANCELLED", len(PROMPT))
        it.of("5").check("CANCELLED", len(PROMPT))
        assert not it.of("5").tokens and not it.of("nobody").updates
        # Another took the seat, and the stopped one stays silent.
        await until(lambda: bool(it.of("4").tokens))
        assert len(it.of("0").tokens) == length
        for name in names:
            it.stop(name)
        await it.ended(*names)
        assert all(len(it.of(name).terminals) == 1 for name in names)


async def test_duplicates_and_attempts(verifier: Verifier, tiny_llama: TinyLlama) -> None:
    """A second submit is ignored while the first lives; a newer attempt takes over, on another stream even."""
    verifier.throttle(0.003)
    wanted = tiny_llama.generate(PROMPT, 60)
    async with client(verifier) as old, client(verifier) as new:
        for _ in range(3):
            old.submit("a", PROMPT, 60)
        old.submit("b", PROMPT, 60)
        await until(lambda: len(old.of("a").tokens) >= 5)
        old.submit("a", [9, 9], 60)
        old.submit("c", PROMPT, 1)  # streams are not ordered among each other: what was sent before has arrived with it
        await old.ended("c")
        new.submit("a", PROMPT, 60, attempt=1, committed=wanted[:4])
        await new.ended("a", attempt=1)
        await old.ended("b")
        old.of("b").check("LENGTH", len(PROMPT))
        tiny_llama.assert_same(PROMPT, old.of("b").tokens, wanted)
        assert not old.of("a").terminals and len(old.of("a").tokens) < 60
        assert old.of("a").tokens == wanted[: len(old.of("a").tokens)]
        new.of("a", 1).check("LENGTH", len(PROMPT) + 4)
        assert new.of("a", 1).tokens == wanted[4:]
        # An older attempt that comes late starts over; it is the scheduler that must not care.
        assert set(new.heard) == {("a", 1)}


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": []}, "prompt_token_ids: is empty"),
    "alien token": ({"prompt": [1, 330]}, "prompt_token_ids: 330 is outside the vocabulary of 330"),
    "too long": ({"max_tokens": 4096}, "max_tokens: 4096 with a prompt of 8 tokens; the context holds 4096"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: 0 with a prompt of 8 tokens"),
    "no rule": ({"rule": types_pb2.RULE_UNSPECIFIED}, "rule: 0 is not supported"),
    "hot": ({"temperature": 1000.0}, "sampling: temperature 1000.0"),
}


async def test_invalid_requests_fail_alone(verifier: Verifier) -> None:
    async with client(verifier) as it:
        for name, (fields, _) in INVALID.items():
            it.submit(name, **{"prompt": PROMPT, "max_tokens": 5, **fields})
        it.submit("good", PROMPT, 5)
        await it.ended("good", *INVALID)
        it.of("good").check("LENGTH", len(PROMPT))
        for name, (_, says) in INVALID.items():
            it.of(name).check("FAILED", 0)
            terminal = it.of(name).terminals[0]
            assert terminal.error_code == "INVALID_ARGUMENT" and terminal.error_message.startswith(says)


@pytest.mark.parametrize("transport", ["grpc", "inproc"])
async def test_too_many_waiting(transport: str, tiny_llama: TinyLlama) -> None:
    async with running(transport, tiny_llama.folder, max_waiting=2, max_num_seqs=1) as verifier:
        verifier.throttle(0.003)
        async with client(verifier) as it:
            it.submit("first", PROMPT, LONG)
            await until(lambda: bool(it.of("first").tokens))
            for name in "abcd":
                it.submit(name, PROMPT, 5)
            await it.ended("c", "d")
            for name in "cd":
                it.of(name).check("FAILED", 0)
                assert it.of(name).terminals[0].error_code == "RESOURCE_EXHAUSTED"
            it.stop("first")
            await it.ended("a", "b")
            for name in "ab":
                it.of(name).check("LENGTH", len(PROMPT))
        await verifier.check_empty()


async def test_heartbeats_keep_an_idle_stream_and_silence_ends_it(verifier: Verifier) -> None:
    async with client(verifier) as beating, client(verifier, beating=False) as silent:
        silent.submit("s", PROMPT, 3)
        failure = await silent.closed()
        assert isinstance(failure, UnavailableError) and "the scheduler sent nothing for 0.8 s" in failure.message
        silent.of("s").check("LENGTH", len(PROMPT))
        assert silent.beats >= 1
        await until(lambda: beating.beats >= 3)
        assert beating.failure is None
        beating.submit("b", PROMPT, 3)
        await beating.ended("b")


@pytest.mark.parametrize("how", ["cancelled", "half-closed"])
async def test_requests_outlive_their_stream_for_the_grace_period(verifier: Verifier, how: str) -> None:
    """One is taken over meanwhile; the other is freed, nobody being told."""
    verifier.throttle(0.003)
    engine = verifier.service._engine
    async with client(verifier) as lost:
        for name in "ab":
            lost.submit(name, PROMPT, LONG)
        await until(lambda: bool(lost.of("a").tokens and lost.of("b").tokens))
        if how == "half-closed":
            lost.half_close()
            assert await lost.closed() is None
    ended_at = asyncio.get_running_loop().time()
    async with client(verifier) as heir:
        heir.submit("b", PROMPT, LONG, attempt=1, committed=lost.of("b").tokens)
        await until(lambda: bool(heir.of("b", 1).tokens))
        assert engine.load().running == 2  # a is parked, not gone
        await until(lambda: engine.load().running == 1)
        assert asyncio.get_running_loop().time() - ended_at > 0.35
        before = len(heir.of("b", 1).tokens)
        await until(lambda: len(heir.of("b", 1).tokens) > before)
        heir.stop("b", attempt=1)
        await heir.ended("b", attempt=1)
        heir.of("b", 1).check("CANCELLED", len(PROMPT) + len(lost.of("b").tokens))


async def test_a_request_taken_over_within_its_stream_is_freed_with_it(verifier: Verifier) -> None:
    """The stream that is lost held a second attempt: it is that one which is parked and freed."""
    verifier.throttle(0.003)
    async with client(verifier) as it:
        it.submit("a", PROMPT, LONG)
        await until(lambda: bool(it.of("a").tokens))
        it.submit("a", PROMPT, LONG, attempt=1)
        await until(lambda: bool(it.of("a", 1).tokens))
        it.submit("a", PROMPT, LONG, attempt=0)  # late, and ignored
        await asyncio.sleep(0.05)
    await until(lambda: not verifier.service._engine.busy, 3)


async def test_two_schedulers_hear_of_their_own_only(verifier: Verifier, tiny_llama: TinyLlama) -> None:
    wanted = tiny_llama.generate(PROMPT, 20)
    async with client(verifier) as one, client(verifier) as two:
        for i, it in itertools.product(range(4), (one, two)):
            it.submit(f"{'one' if it is one else 'two'}-{i}", PROMPT, 20)
        for it, side in ((one, "one"), (two, "two")):
            names = [f"{side}-{i}" for i in range(4)]
            await it.ended(*names)
            assert {name for name, _ in it.heard} == set(names)
            assert all(it.of(name).tokens == wanted for name in names)


async def test_attaches_reports_takes_policy_and_drains(tiny_llama: TinyLlama) -> None:
    scheduler = FakeScheduler()
    async with (
        serving("grpc", scheduler) as address,
        running("grpc", tiny_llama.folder, scheduler=address) as verifier,
    ):
        verifier.throttle(0.003)
        await until(lambda: bool(scheduler.of("register")))
        registered = scheduler.of("register")[0]
        assert (registered.address, registered.pid) == (verifier.address, os.getpid())
        assert registered.metrics_address == verifier.service.metrics_address
        assert registered.description.kind == "verifier" and registered.held_policy.epoch.boot_id == 0
        epoch = control_pb2.PolicyEpoch(boot_id=5, counter=2)
        scheduler.say.put_nowait(Answer(policy=control_pb2.Policy(name="fixed:3", max_draft_tokens=3, epoch=epoch)))
        await until(lambda: verifier.service._engine.policy.max_draft_tokens == 3)
        async with client(verifier) as it:
            it.submit("a", PROMPT, 300)
            await until(lambda: bool(scheduler.of("load")) and scheduler.of("load")[-1].running == 1)
            load = scheduler.of("load")[-1]
            assert load.kv_pages_total == 512 and load.kv_pages_used > 0 and load.policy_epoch == epoch
            draining = asyncio.create_task(verifier.service.drain(10))
            await until(lambda: bool(scheduler.of("draining")))
            it.submit("late", PROMPT, 5)
            await it.ended("late")
            assert it.of("late").terminals[0].error_code == "UNAVAILABLE"
            await it.ended("a")
            it.of("a").check("LENGTH", len(PROMPT))
            await draining


async def test_a_verifier_that_is_told_to_stop_at_once_stops(tiny_llama: TinyLlama) -> None:
    for transport in ("grpc", "inproc"):
        async with running(transport, tiny_llama.folder) as verifier:
            verifier.throttle(0.003)
            async with client(verifier) as it:
                it.submit("a", PROMPT, LONG)
                await until(lambda: bool(it.of("a").tokens))
                await asyncio.wait_for(verifier.service.drain(0), 5)
                assert isinstance(await it.closed(), UnavailableError)


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, tiny_llama: TinyLlama) -> None:
    """As a process: exit status 2, nothing on stdout, what is wrong on stderr."""
    for file in tiny_llama.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:4000])
    command = [sys.executable, "-m", "services.verifier", "--set", f'model.path="{tmp_path}"']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    damaged = tmp_path / "model.safetensors"
    assert done.stderr.startswith(f"kadence: {damaged}: damaged or not a safetensors file")
