"""A verifier replica under test, and a scheduler's end of its Decode stream."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kadence.internal import common_pb2, verifier_pb2_grpc
from kadence.internal import verifier_pb2 as pb
from kadence.v1 import types_pb2
from services.runtime import config as runtime_config
from services.runtime.channels import connect
from services.verifier.config import VerifierConfig
from services.verifier.service import VerifierService
from tests.support.scheduling import until

SETTINGS: dict[str, Any] = {
    "model.dtype": "float32",
    "verifier.threads": 1,
    "verifier.max_num_seqs": 4,
    "verifier.max_num_batched_tokens": 64,
    "verifier.kv_tokens": 8192,
    "verifier.heartbeat_seconds": 0.3,
    "verifier.grace_seconds": 0.4,
    # Patience for a busy machine; tests of lateness set their own.
    "verifier.draft_deadline_seconds": 2.0,
}


@dataclass
class Verifier:
    """A running replica in this process, however it is reached."""

    service: VerifierService
    address: str

    def throttle(self, seconds: float) -> None:
        """Makes every step take at least so long, so that tests can act between steps."""
        target = self.service._engine._target
        forward = type(target).forward_tapped

        def slow(*args: Any) -> Any:
            time.sleep(seconds)
            return forward(target, *args)

        target.forward_tapped = slow  # type: ignore[method-assign]

    async def metric(self, name: str) -> float:
        """The value of a sample by its full name, such as kadence_kv_pages{state="used"}."""
        page = await asyncio.to_thread(self._page)
        lines = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return next((float(value) for sample, value in lines if _matches(sample, name)), 0.0)

    async def check_empty(self) -> None:
        """No request is left and every page is free."""
        await until(lambda: not self.service._engine.busy)
        load = self.service._engine.load()
        assert (load.running, load.waiting, load.pages_used, load.outstanding_tokens) == (0, 0, 0, 0)
        assert await self.service.health()

    def _page(self) -> str:
        return urllib.request.urlopen(f"http://{self.service.metrics_address}/metrics", timeout=5).read().decode()


def _matches(sample: str, name: str) -> bool:
    """Whether `sample` has the name and all labels of `name`; metrics carry labels of the process as well."""
    bare, _, labels = name.rstrip("}").partition("{")
    its, _, its_labels = sample.rstrip("}").partition("{")
    return bare == its and set(filter(None, labels.split(","))) <= set(its_labels.split(","))


@asynccontextmanager
async def running(transport: str, folder: Path, **settings: Any) -> AsyncIterator[Verifier]:
    """A verifier of the model in `folder`; `settings` are keys of its table."""
    overrides = {"model.path": str(folder), **SETTINGS, **{f"verifier.{key}": v for key, v in settings.items()}}
    config = runtime_config.load(VerifierConfig, None, "verifier", overrides)
    service = VerifierService(config, inproc_name="verifier-test" if transport == "inproc" else None)
    address = await service.start()
    try:
        yield Verifier(service, address)
    finally:
        await service.drain(0)


@dataclass
class Heard:
    """What came back for one request and attempt."""

    updates: list[pb.RequestUpdate] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def terminals(self) -> list[pb.Terminal]:
        return [update.terminal for update in self.updates if update.HasField("terminal")]

    def check(self, reason: str, length: int) -> None:
        """One terminal, the last word; rounds and base lengths count on from `length` tokens."""
        assert [types_pb2.FinishReason.Name(t.reason) for t in self.terminals] == [f"FINISH_REASON_{reason}"]
        assert self.updates[-1].HasField("terminal")
        for number, update in enumerate(u for u in self.updates if u.token_ids):
            assert (update.stamp.round, update.stamp.base_length) == (number, length)
            length += len(update.token_ids)


class Client:
    """A scheduler's Decode stream; beats unless told not to."""

    def __init__(self, stub: Any, beating: bool = True) -> None:
        self._outgoing: asyncio.Queue[pb.DecodeRequest | None] = asyncio.Queue()
        self._beating = beating
        self.heard: dict[tuple[str, int], Heard] = {}
        self.responses: list[pb.DecodeResponse] = []
        self.beats = 0
        self.failure: Exception | None = None
        self.call = stub.Decode(self._requests())
        self._reader = asyncio.create_task(self._read())

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        attempt: int = 0,
        committed: Sequence[int] = (),
        **sampling: Any,
    ) -> None:
        """Sends one request; greedy unless told otherwise."""
        neutral = {"top_p": 1.0, "repetition_penalty": 1.0, "rule": types_pb2.RULE_MATCH}
        options = {**neutral, "max_tokens": max_tokens, **sampling}
        message = pb.Submit(
            stamp=common_pb2.Stamp(request_id=name, attempt=attempt),
            prompt_token_ids=prompt,
            committed_token_ids=committed,
            sampling=common_pb2.Sampling(**options),
        )
        self.send(submits=[message])

    def stop(self, name: str, attempt: int = 0) -> None:
        self.send(stops=[pb.Stop(stamp=common_pb2.Stamp(request_id=name, attempt=attempt))])

    def send(self, **fields: Any) -> None:
        self._outgoing.put_nowait(pb.DecodeRequest(**fields))

    def of(self, name: str, attempt: int = 0) -> Heard:
        return self.heard.setdefault((name, attempt), Heard())

    async def ended(self, *names: str, attempt: int = 0, seconds: float = 30) -> None:
        """Until each of the requests ended, and a moment more, in which nothing else may come."""
        await until(lambda: all(self.of(name, attempt).terminals for name in names), seconds)
        await asyncio.sleep(0.02)

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def closed(self) -> Exception | None:
        """Until the verifier ended the stream; how."""
        await asyncio.wait_for(self._reader, 10)
        return self.failure

    async def _read(self) -> None:
        try:
            async for response in self.call:
                if response.HasField("heartbeat"):
                    self.beats += 1
                    continue
                self.responses.append(response)
                for update in response.updates:
                    self.of(update.stamp.request_id, update.stamp.attempt).updates.append(update)
        except Exception as error:
            self.failure = error

    async def _requests(self) -> AsyncIterator[pb.DecodeRequest]:
        while True:
            try:
                async with asyncio.timeout(0.1):
                    message = await self._outgoing.get()
            except TimeoutError:
                if not self._beating:
                    continue
                message = pb.DecodeRequest(heartbeat=common_pb2.Heartbeat(sequence=1))
            if message is None:
                return
            yield message

    def half_close(self) -> None:
        """Says no more, and listens on."""
        self._outgoing.put_nowait(None)


@asynccontextmanager
async def client(verifier: Verifier, **options: Any) -> AsyncIterator[Client]:
    """A scheduler's stream to the verifier."""
    async with connect(verifier_pb2_grpc.VerifierServiceStub, verifier.address) as stub:
        it = Client(stub, **options)
        try:
            yield it
        finally:
            await it.close()
