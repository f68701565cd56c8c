"""The protocol every drafter kind follows, and the registry that finds a kind by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kadence.errors import ConfigError
from services.runtime.config import Frozen, ModelConfig, parse

if TYPE_CHECKING:
    import numpy as np

# Kind -> module with a class `Method`; imported only when chosen, so that small kinds need no torch.
KINDS: dict[str, str] = {
    "none": "services.drafter.methods.none",
    "ngram": "services.drafter.methods.ngram",
    "dflash": "services.drafter.methods.dflash",
    "dflash2": "services.drafter.methods.dflash2",
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

    def cut(self, first: int, end: int) -> FeatureRows:
        """Those of the positions first .. end - 1, which must be among them."""
        count, width = self.shape
        assert self.base <= first < end <= self.base + count, (self.base, self.shape, first, end)
        if (first, end) == (self.base, self.base + count):
            return self
        size = len(self.data) // count
        data = self.data[(first - self.base) * size : (end - self.base) * size]
        return FeatureRows(first, (end - first, width), self.dtype, data)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one session gains in a step: committed tokens, feature rows, or both."""

    key: int
    token_ids: Sequence[int]
    rows: FeatureRows | None = None


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How the request samples, as far as it shapes its drafts."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    rule: str = "match"
    """"match" or "ratio"."""


@dataclass(frozen=True, slots=True)
class ProposeItem:
    """One session that wants a draft of at most `max_tokens` (>= 1) tokens behind its `base_length` tokens."""

    key: int
    max_tokens: int
    sampling: DraftSampling = field(default_factory=DraftSampling)
    attempt: int = 0
    round: int = 0
    base_length: int = 0


@dataclass(frozen=True, slots=True)
class DraftItem:
    """The draft x1..xn for one session; n = 0 means nothing to propose."""

    token_ids: list[int]
    q_ids: np.ndarray | None = None
    """int32 [n, candidates]: what each position was drawn from; None for deterministic drafts."""
    q: np.ndarray | None = None
    """float32 [n, candidates]: with which probabilities."""
    signals: np.ndarray | None = None
    """float32 [n, s], named by Traits.signals."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """A named tensor as bytes."""

    name: str
    dtype: int
    """common_pb2.Dtype."""
    shape: tuple[int, ...]
    data: memoryview
    """Bytes, one dimension."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What the handshake tells of a method; zeros and empties where a kind has no such thing."""

    kind: str
    max_draft_tokens: int
    block_size: int = 0
    taps: tuple[int, ...] = ()
    feature_width: int = 0
    feature_fingerprint: str = ""
    feature_norm_eps: float = 0.0
    window: int = 0
    vocab_size: int = 0
    model_fingerprint: str = ""
    kv_tokens: int = 0
    max_rows: int = 0
    """Most feature rows of one message."""
    signals: tuple[str, ...] = ()
    supports_ratio: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What a method is told of its surroundings."""

    max_draft_tokens: int
    max_sessions: int
    kv_tokens: int
    model: ModelConfig | None = None
    """The target."""


class Method(Protocol):
    """One drafter kind. Sessions are known by key; calls come one at a time and never for an unknown key."""

    Options: ClassVar[type[Frozen]]
    """What [drafter.options] may hold."""
    traits: Traits
    inline_tokens: int
    """Steps that commit at most this many tokens take well under a millisecond and may run on the event loop; -1 if
    none do."""
    projection: Sequence[WireTensor]
    """With what the verifier makes feature rows; empty where the kind takes none."""

    def __init__(self, options: Any, setting: Setting) -> None:
        """Loads everything. Raises ConfigError or CheckpointError."""

    def open(self, key: int) -> None:
        """Begins a session without tokens."""

    def commit(self, news: Sequence[NewTokens]) -> None:
        """Appends committed tokens and rows, in order and without gaps."""

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


def create(kind: str, options: Mapping[str, Any], setting: Setting) -> Method:
    """The method of that kind, loaded. Raises ConfigError for an unknown kind or option, CheckpointError."""
    try:
        check_kind(kind)
    except ValueError as error:
        raise ConfigError(f"[drafter] kind = {kind!r}: {error}") from error
    method: type[Method] = importlib.import_module(KINDS[kind]).Method
    return method(parse(method.Options, options, f"drafter kind {kind}", "drafter.options"), setting)
