"""The protocol every drafter kind follows, and the registry that finds a kind by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from kadence.errors import ConfigError
from services.runtime.config import Frozen, parse

# Kind -> module with a class `Method`; imported only when chosen, so that small kinds need no torch.
KINDS: dict[str, str] = {
    "none": "services.drafter.methods.none",
    "ngram": "services.drafter.methods.ngram",
}
ONE_KIND = "a deployment has one drafter kind: one request runs one drafter, the schedule is what combines"


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Feature rows [n, width] of the positions `base` .. `base + n - 1`, as they came over the wire."""

    base: int
    shape: tuple[int, int]
    dtype: int
    """common_pb2.Dtype."""
    data: bytes
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ProposeItem:
    """One session that wants a draft of at most `max_tokens` (>= 1) tokens."""

    key: int
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DraftItem:
    """The draft x1..xn for one session; n = 0 means nothing to propose."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Traits:
    """What the handshake tells of a method; zeros and empties where a kind has no such thing."""

    kind: str
    max_draft_tokens: int
    block_size: int = 0
    taps: tuple[int, ...] = ()
    feature_width: int = 0
    window: int = 0
    vocab_size: int = 0
    feature_fingerprint: str = ""
    supports_ratio: bool = False


class Method(Protocol):
    """One drafter kind. Sessions are known by key; calls come one at a time and never for an unknown key."""

    Options: ClassVar[type[Frozen]]
    """What [drafter.options] may hold."""
    traits: Traits
    inline_tokens: int
    """Steps that commit at most this many tokens take well under a millisecond and may run on the event loop."""

    def __init__(self, options: Any, max_draft_tokens: int) -> None: ...

    def open(self, key: int) -> None:
        """Begins a session without tokens."""

    def commit(self, key: int, token_ids: Sequence[int], rows: FeatureRows | None) -> None:
        """Appends committed tokens."""

    def propose(self, items: Sequence[ProposeItem]) -> list[DraftItem]:
        """One draft per item, in order."""

    def close(self, key: int) -> None:
        """Ends a session and frees what it held."""


def check_kind(kind: Any) -> str:
    """`kind` if it is one known name; ValueError with the reason otherwise."""
    if not isinstance(kind, str) or any(mark in kind for mark in ",+ "):
        raise ValueError(ONE_KIND)
    if kind not in KINDS:
        raise ValueError(f"must be one of {', '.join(KINDS)}")
    return kind


def create(kind: str, options: Mapping[str, Any], max_draft_tokens: int) -> Method:
    """The method of that kind. Raises ConfigError for an unknown kind or option."""
    try:
        check_kind(kind)
    except ValueError as error:
        raise ConfigError(f"[drafter] kind = {kind!r}: {error}") from error
    method: type[Method] = importlib.import_module(KINDS[kind]).Method
    return method(parse(method.Options, options, f"drafter kind {kind}", "drafter.options"), max_draft_tokens)
