"""The replicas that are attached, and which of them fit together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kadence.errors import FieldViolation, InvalidRequestError
from services.scheduler.policy import NO_EPOCH, Epoch

LOST_KEPT_SECONDS = 60.0
"""How long a lost replica is still shown."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a replica says it is; see kadence.internal.Description."""

    kind: str
    replica_id: str
    model: str = ""
    model_fingerprint: str = ""
    vocab_size: int = 0
    drafter_kind: str = ""
    max_sessions: int = 0
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica last reported; `stats` is passed on as it came."""

    running: int = 0
    waiting: int = 0
    outstanding_tokens: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    stats: object = None
    policy_epoch: Epoch = NO_EPOCH
    drafter: str = ""
    drafter_problem: str = ""


@dataclass(slots=True, eq=False)
class Replica:
    """One attached process."""

    description: Description
    address: str
    metrics_address: str = ""
    pid: int = 0
    state: str = "ready"
    """ "ready", "draining" or "lost"."""
    attached: bool = True
    """Whether its Attach stream is open."""
    load: Load = field(default_factory=Load)
    lost_at: float = 0.0
    http_address: str = ""
    """The scheduler's only."""

    @property
    def id(self) -> str:
        """Unique per process start."""
        return self.description.replica_id

    @property
    def kind(self) -> str:
        """ "verifier" or "drafter"."""
        return self.description.kind


class Fleet:
    """All replicas by id. It decides nothing but who fits; callers act on its answers."""

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._replicas: dict[str, Replica] = {}

    def add(self, replica: Replica) -> list[Replica]:
        """Takes a replica in; returns those it replaces: the same process attached again, or its address taken over.

        Raises InvalidRequestError naming both values if it does not fit.
        """
        replaced = [r for r in self._replicas.values() if replica.id == r.id or replica.address == r.address]
        others = [r.description for r in self._replicas.values() if r.state != "lost" and r not in replaced]
        wrong = mismatches(replica.description, others, self._model, self._vocab_size)
        if wrong:
            raise InvalidRequestError("; ".join(f"{v.field}: {v.description}" for v in wrong), violations=tuple(wrong))
        for old in replaced:
            del self._replicas[old.id]
        self._replicas[replica.id] = replica
        return replaced

    def lose(self, replica: Replica, now: float) -> bool:
        """Marks it lost, or forgets it if it had said goodbye; False if it had been lost or replaced before."""
        if self._replicas.get(replica.id) is not replica or replica.state == "lost":
            return False
        if replica.state == "draining":
            del self._replicas[replica.id]
        replica.state, replica.lost_at = "lost", now
        idle = replace(replica.load, running=0, waiting=0, outstanding_tokens=0, kv_pages_used=0)
        replica.load = replace(idle, drafter="", drafter_problem="")
        return True

    def all(self, now: float) -> list[Replica]:
        """Every replica, those lost long ago dropped, in the order they came."""
        for replica in [r for r in self._replicas.values() if r.state == "lost"]:
            if now - replica.lost_at > LOST_KEPT_SECONDS:
                del self._replicas[replica.id]
        return list(self._replicas.values())

    def holds(self, replica: Replica) -> bool:
        """Whether this very registration is the current one of its process."""
        return self._replicas.get(replica.id) is replica

    def live(self, kind: str) -> list[Replica]:
        """Those that take work."""
        return [r for r in self._replicas.values() if r.kind == kind and r.state == "ready"]

    def drafter_kind(self) -> str:
        """The deployment's drafter kind, "none" while no drafter is attached."""
        kinds = [r.description.drafter_kind for r in self.live("drafter")]
        return kinds[0] if kinds and kinds[0] else "none"

    def max_model_len(self, model_limit: int) -> int:
        """The longest request every verifier takes."""
        return min([model_limit, *(n for r in self.live("verifier") if (n := r.description.max_model_len) > 0)])


def mismatches(new: Description, others: Iterable[Description], model: str, vocab_size: int) -> list[FieldViolation]:
    """Why `new` cannot work beside `others` for the served model; 0 and "" match anything."""
    if new.kind not in ("verifier", "drafter"):
        return [FieldViolation("description.kind", f"{new.kind!r}; verifier or drafter")]
    if not new.replica_id:
        return [FieldViolation("description.replica_id", "is empty")]
    found = []
    if new.model not in ("", model):
        found.append(FieldViolation("description.model", f"{new.model!r}; this scheduler serves {model!r}"))
    if new.vocab_size not in (0, vocab_size):
        found.append(FieldViolation("description.vocab_size", f"{new.vocab_size}; the served model has {vocab_size}"))
    for other in others:
        who = f"{other.kind} {other.replica_id}"
        mine, its = new.model_fingerprint, other.model_fingerprint
        # A drafter of another target costs drafts alone: verifiers find out when they shake hands, and say so.
        if mine and its and mine != its and new.kind == other.kind:
            found.append(FieldViolation("description.model_fingerprint", f"{mine!r}; {who} has {its!r}"))
            break
        mine, its = new.drafter_kind, other.drafter_kind
        if new.kind == other.kind == "drafter" and mine != its:
            found.append(FieldViolation("description.drafter_kind", f"{mine!r}; {who} is of kind {its!r}"))
            break
    return found
