"""One Decode stream per verifier: requests go there, commits come back; dialled again when it breaks."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from kadence.errors import APIError, UnavailableError
from kadence.internal import common_pb2, verifier_pb2, verifier_pb2_grpc
from services.runtime.channels import connect
from services.scheduler import admission, messages
from services.scheduler.fleet import Replica
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.outcomes import Terminal
from services.scheduler.routing import Candidate
from services.scheduler.session import Session

_DESCRIBE_SECONDS = 10.0
_BACKOFF = (0.1, 2.0)  # first and longest wait between tries
_MAX_ORPHANS = 1024

_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Whom a link tells what it cannot settle itself."""

    def link_up(self) -> None:
        """The link takes requests now."""

    def link_down(self, link: VerifierLink, reason: str, sessions: list[Session]) -> None:
        """The link lost its verifier, and with it these unfinished requests."""


class VerifierLink:
    """The requests at one verifier, and the stream that carries them."""

    def __init__(
        self,
        replica: Replica,
        owner: Owner,
        metrics: SchedulerMetrics,
        describe: Callable[[], common_pb2.Description],
        heartbeat_seconds: float,
    ) -> None:
        self.replica = replica
        self.ready = False
        """Whether its stream is open."""
        self.outstanding = 0
        """Tokens left to prefill or produce, of all its requests."""
        self._owner = owner
        self._metrics = metrics
        self._describe = describe
        self._heartbeat_seconds = heartbeat_seconds
        self._sessions: dict[str, Session] = {}
        self._submits: list[verifier_pb2.Submit] = []
        self._stops: list[verifier_pb2.Stop] = []
        self._wake = asyncio.Event()
        self._told = ""
        """The last reason for being down that was logged."""
        self._clock = asyncio.get_running_loop().time
        self._task = asyncio.create_task(self._run(), name=f"link {replica.id}")

    def candidate(self) -> Candidate:
        """How routing sees it."""
        capacity = admission.verifier_capacity(self.replica.description.max_sessions)
        open_for_work = self.ready and self.replica.state == "ready"
        return Candidate(
            self.replica.id,
            self.outstanding,
            len(self._sessions),
            capacity if open_for_work else 0,
            self.replica.load.outstanding_tokens,
        )

    def submit(self, session: Session) -> None:
        """Sends the request with everything it has committed so far."""
        assert self.ready
        session.prefilled = False
        self._sessions[session.request.key] = session
        self._account(session, session.outstanding())
        self._submits.append(messages.submit(session))
        self._wake.set()

    def release(self, session: Session) -> None:
        """Forgets a request that ended; the verifier is told, unless it was the one to end it."""
        if not self._forget(session):
            return
        key = session.request.key
        unsent = [submit for submit in self._submits if submit.stamp.request_id != key]
        if len(unsent) < len(self._submits):
            self._submits = unsent  # it never left
            return
        self._stops.append(messages.stop(key, session.attempt))
        self._wake.set()

    async def close(self, reason: str) -> None:
        """Ends the stream; unfinished requests go to the owner."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._down(reason)

    async def _run(self) -> None:
        first, longest = _BACKOFF
        wait = first
        while True:
            reason = "the verifier ended the stream"
            try:
                await self._stream_once()
            except APIError as error:
                reason = error.message
            except Exception as error:
                _log.exception("link to %s failed", self.replica.id)
                reason = f"internal error: {type(error).__name__}"
            wait = first if self.ready else min(longest, wait * 2)
            if reason != self._told:
                self._told = reason
                _log.warning("verifier %s at %s: %s", self.replica.id, self.replica.address, reason)
            self._down(reason)
            await asyncio.sleep(wait)

    async def _stream_once(self) -> None:
        """One stream from dial to loss."""
        async with connect(verifier_pb2_grpc.VerifierServiceStub, self.replica.address) as stub:
            ours = self._describe()
            request = verifier_pb2.DescribeVerifierRequest(caller=ours)
            answer = await stub.DescribeVerifier(request, timeout=_DESCRIBE_SECONDS)
            its_id = answer.verifier.replica_id
            if its_id != self.replica.id:
                raise UnavailableError(f"{self.replica.address} is {its_id} now, no longer {self.replica.id}")
            call = stub.Decode(self._requests(ours.replica_id))
            try:
                self.ready, self._told = True, ""
                self._owner.link_up()
                async for response in call:
                    self._receive(response)
            finally:
                call.cancel()

    async def _requests(self, scheduler_id: str) -> AsyncIterator[verifier_pb2.DecodeRequest]:
        """Who we are, then submits and stops as they come, and a heartbeat when there was nothing to say."""
        yield messages.decode_request(scheduler_id=scheduler_id, stops=self._take_stops())
        for sequence in itertools.count(1):
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._wake.wait()
            except TimeoutError:
                yield messages.decode_request(heartbeat=sequence)
                continue
            self._wake.clear()
            submits, self._submits = self._submits, []
            yield messages.decode_request(submits, self._take_stops())

    def _take_stops(self) -> list[verifier_pb2.Stop]:
        stops, self._stops = self._stops, []
        return stops

    def _receive(self, response: verifier_pb2.DecodeResponse) -> None:
        """One step of the whole batch; what is done here is done for every request and step, so it is little."""
        now, tokens = self._clock(), 0
        for message in response.updates:
            stamp = message.stamp
            session = self._sessions.get(stamp.request_id)
            if session is None or session.attempt != stamp.attempt:
                continue  # ended here, and its verifier's last words crossed our stop
            tokens += self._advance(session, message, now)
        if tokens:
            self._metrics.generated.inc(tokens)

    def _advance(self, session: Session, message: Any, now: float) -> int:
        update, before = messages.update(message), session.last_at
        if update.terminal is not None:
            self._forget(session)
            if _can_move(update.terminal):
                self._owner.link_down(self, update.terminal.error_message, [session])
                return 0
        first = session.first_at == 0.0
        kept = session.receive(update, now)
        if kept:
            if first:
                self._metrics.first_token(now - session.accepted_at)
            else:
                self._metrics.step((now - before) / kept)
            if session.outcome is None:
                self._account(session, session.outstanding())
        return kept

    def _account(self, session: Session, work: int) -> None:
        self.outstanding += work - session.work
        session.work = work

    def _forget(self, session: Session) -> bool:
        held = self._sessions.pop(session.request.key, None)
        if held is None:
            return False
        assert held is session
        self._account(session, 0)
        return True

    def _down(self, reason: str) -> None:
        self.ready = False
        lost = list(self._sessions.values())
        for session in lost:
            self._forget(session)
            # Should the verifier be back, it still holds these parked; the next stream's first message ends them.
            self._stops.append(messages.stop(session.request.key, session.attempt))
        self._stops = self._stops[-_MAX_ORPHANS:]
        self._submits = []
        self._owner.link_down(self, reason, lost)


def _can_move(terminal: Terminal) -> bool:
    """Whether another verifier may do what this one refused."""
    return terminal.error_code == "UNAVAILABLE"
