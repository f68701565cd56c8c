"""A drafter without a network: stands in for DrafterLink, drafts what a test says, and checks what it is told."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable

from kadence.internal import common_pb2
from kadence.internal import drafter_pb2 as pb
from services.verifier.drafter_link import Connection

Propose = Callable[[str, list[int], int], list[int]]
"""(request id, tokens so far, most wanted) -> draft."""


class ScriptedDrafter:
    """Answers within `send`. Its sessions must be told every token, once and in order, by base length."""

    def __init__(self, propose: Propose, *, max_sessions: int = 0, max_draft_tokens: int = 0) -> None:
        self.propose = propose
        self.replies: queue.SimpleQueue[pb.DraftResponse | None] = queue.SimpleQueue()
        self.sessions: dict[str, list[int]] = {}
        self.attempts: dict[str, int] = {}
        self.requests: list[pb.DraftRequest] = []
        self.suspensions = 0
        self._limits = (max_sessions, max_draft_tokens)
        self._generation = 0
        self.connection: Connection | None = None
        self.reconnect()

    def reconnect(self) -> None:
        """A new connection: sessions died with the old one."""
        self._generation += 1
        self.sessions.clear()
        self.connection = Connection(self._generation, f"scripted-{self._generation}", *self._limits)

    def lose(self) -> None:
        """The connection breaks."""
        self.connection = None
        self.replies.put(None)

    def suspend(self) -> None:
        """As DrafterLink: gives the connection up."""
        self.suspensions += 1
        self.connection = None

    def send(self, request: pb.DraftRequest, generation: int) -> None:
        """Applies a message as a real drafter does, and answers."""
        self.requests.append(request)
        for close in request.closes:
            self.sessions.pop(close.stamp.request_id, None)
        for opening in request.opens:
            self.sessions[opening.stamp.request_id] = []
            self.attempts[opening.stamp.request_id] = opening.stamp.attempt
        for commit in request.commits:
            session = self.sessions.get(commit.stamp.request_id)
            if session is not None and commit.stamp.base_length <= len(session):
                del session[commit.stamp.base_length :]
                session.extend(commit.token_ids)
        if not request.proposes:
            return
        response = pb.DraftResponse(step=request.step)
        for wish in request.proposes:
            session, have = self.sessions.get(wish.stamp.request_id), self.have(wish.stamp.request_id)
            if session is None or have != wish.stamp.base_length:
                response.resyncs.add(stamp=wish.stamp, have=have)
                continue
            assert self.attempts[wish.stamp.request_id] == wish.stamp.attempt and wish.max_tokens >= 1
            draft = self.propose(wish.stamp.request_id, list(session), wish.max_tokens)
            response.drafts.add(stamp=wish.stamp, token_ids=draft)
        self.answer(response)

    def have(self, name: str) -> int:
        """Tokens of a session that are held."""
        return len(self.sessions.get(name, []))

    def answer(self, response: pb.DraftResponse) -> None:
        """Delivers; tests override it to be late, wrong or silent."""
        self.replies.put(response)


class FaultyDrafter(ScriptedDrafter):
    """Everything a drafter can do wrong, at random: silence, old or foreign stamps, alien tokens, lost sessions."""

    def __init__(self, propose: Propose, seed: int) -> None:
        self._rng = random.Random(seed)
        super().__init__(propose)

    def suspend(self) -> None:
        super().suspend()
        self.reconnect()

    def send(self, request: pb.DraftRequest, generation: int) -> None:
        if self.sessions and self._rng.random() < 0.1:
            name = self._rng.choice(sorted(self.sessions))
            del self.sessions[name][self._rng.randint(0, len(self.sessions[name])) :]
        super().send(request, generation)

    def answer(self, response: pb.DraftResponse) -> None:
        match self._rng.randrange(12):
            case 0:
                return
            case 1:
                self.lose()
                self.reconnect()
            case 2:
                response.step -= 1
            case 3:
                self.replies.put(pb.DraftResponse(step=response.step - 1, drafts=response.drafts))
            case 4:
                for draft in response.drafts:
                    draft.stamp.base_length -= 1
            case 5:
                for draft in response.drafts:
                    draft.token_ids.extend([10**6, -1])
            case 6:
                for draft in response.drafts:
                    draft.stamp.attempt += 1
            case 7:
                del response.drafts[:1]
            case 8:
                response.drafts.add(stamp=common_pb2.Stamp(request_id="nobody"), token_ids=[1])
            case 9:
                for draft in response.drafts:
                    draft.token_ids.extend([3] * 50)  # more than was asked for
        super().answer(response)


def oracle(answers: dict[str, list[int]]) -> Propose:
    """Drafts the truth; `answers` holds prompt and continuation."""
    return lambda name, tokens, most: answers[name][len(tokens) : len(tokens) + most]


def wrong(answers: dict[str, list[int]], vocab: int) -> Propose:
    """Never a right token at the first position; right ones behind it."""

    def propose(name: str, tokens: list[int], most: int) -> list[int]:
        truth = answers[name][len(tokens) : len(tokens) + most]
        return [(truth[0] + 1) % vocab, *truth[1:]] if truth else [0]

    return propose


def partly(answers: dict[str, list[int]], vocab: int, seed: int, right: float) -> Propose:
    """Each token right with probability `right`; drafts of any length up to the wanted one."""
    rng = random.Random(seed)

    def propose(name: str, tokens: list[int], most: int) -> list[int]:
        truth = answers[name][len(tokens) : len(tokens) + most]
        return [t if rng.random() < right else rng.randrange(vocab) for t in truth][: rng.randint(0, most)]

    return propose
