"""The drafter's edge: DraftRequest into a checked Step, Answer into DraftResponse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2, drafter_pb2
from kadence.v1 import types_pb2
from services.drafter.methods import DraftItem, DraftSampling, FeatureRows, Traits, WireTensor
from services.drafter.step import Answer, Commit, Stamp, Step, Wish
from services.runtime import tensors

if TYPE_CHECKING:
    import numpy as np

_ID_BYTES = 128
_PIECE_BYTES = 4 << 20


def to_step(message: drafter_pb2.DraftRequest, traits: Traits) -> Step:
    """The message in plain types. Raises InvalidRequestError naming the field that cannot be."""
    _check_row_count(message, traits)
    _check_once(message)
    return Step(
        number=message.step,
        closes=[_stamp(close.stamp, f"closes[{i}]") for i, close in enumerate(message.closes)],
        opens=[_stamp(open_.stamp, f"opens[{i}]") for i, open_ in enumerate(message.opens)],
        commits=[_commit(commit, f"commits[{i}]", traits) for i, commit in enumerate(message.commits)],
        wishes=[_wish(propose, f"proposes[{i}]", traits) for i, propose in enumerate(message.proposes)],
    )


def from_answer(answer: Answer) -> drafter_pb2.DraftResponse:
    """The answer as a message."""
    return drafter_pb2.DraftResponse(
        step=answer.number,
        drafts=[_draft(stamp, item) for stamp, item in answer.drafts],
        resyncs=[drafter_pb2.Resync(stamp=_echo(stamp), have=have) for stamp, have in answer.resyncs],
        compute_seconds=answer.compute_seconds,
    )


def pieces(tensor: WireTensor) -> Iterator[drafter_pb2.FetchProjectionResponse]:
    """The tensor in pieces of at most 4 MiB."""
    for offset in range(0, len(tensor.data), _PIECE_BYTES):
        yield drafter_pb2.FetchProjectionResponse(
            name=tensor.name,
            dtype=tensor.dtype,  # type: ignore[arg-type]
            shape=tensor.shape,
            offset=offset,
            data=bytes(tensor.data[offset : offset + _PIECE_BYTES]),
        )


def _draft(stamp: Stamp, item: DraftItem) -> drafter_pb2.Draft:
    draft = drafter_pb2.Draft(stamp=_echo(stamp), token_ids=item.token_ids)
    if not item.token_ids:
        return draft
    if item.q_ids is not None and item.q is not None:
        draft.q.token_ids.CopyFrom(_tensor(item.q_ids, common_pb2.DTYPE_INT32))
        draft.q.probabilities.CopyFrom(_tensor(item.q, common_pb2.DTYPE_FLOAT32))
    if item.signals is not None:
        draft.signals.CopyFrom(_tensor(item.signals, common_pb2.DTYPE_FLOAT32))
    return draft


def _tensor(array: np.ndarray, dtype: common_pb2.Dtype) -> common_pb2.Tensor:
    assert array.itemsize == tensors.ITEM_BYTES[dtype], array.dtype
    return common_pb2.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())


def _stamp(stamp: common_pb2.Stamp, field: str) -> Stamp:
    if not 0 < len(stamp.request_id) <= _ID_BYTES:
        size = len(stamp.request_id)
        raise InvalidRequestError.of(f"{field}.stamp.request_id", f"has {size} characters; must be 1..{_ID_BYTES}")
    return Stamp(stamp.request_id, stamp.attempt, stamp.round, stamp.base_length)


def _echo(stamp: Stamp) -> common_pb2.Stamp:
    return common_pb2.Stamp(
        request_id=stamp.request_id, attempt=stamp.attempt, round=stamp.round, base_length=stamp.base_length
    )


def _commit(commit: drafter_pb2.SessionCommit, field: str, traits: Traits) -> Commit:
    stamp = _stamp(commit.stamp, field)
    token_ids = list(commit.token_ids)
    _check_ids(token_ids, f"{field}.token_ids", traits.vocab_size)
    return Commit(stamp, token_ids, _rows(commit, field, traits) if commit.HasField("feature_rows") else None)


def _check_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> None:
    if token_ids and (min(token_ids) < 0 or (vocab_size and max(token_ids) >= vocab_size)):
        index, bad = next((i, t) for i, t in enumerate(token_ids) if t < 0 or (vocab_size and t >= vocab_size))
        limit = f"0..{vocab_size - 1}" if vocab_size else ">= 0"
        raise InvalidRequestError.of(f"{field}[{index}]", f"is {bad}; must be {limit}")


def _check_row_count(message: drafter_pb2.DraftRequest, traits: Traits) -> None:
    rows = sum(commit.feature_rows.shape[0] for commit in message.commits if commit.feature_rows.shape)
    if traits.feature_width and rows > traits.max_rows:
        raise InvalidRequestError.of("commits", f"have {rows} feature rows; a message may have {traits.max_rows}")


def _check_once(message: drafter_pb2.DraftRequest) -> None:
    seen: set[str] = set()
    for i, propose in enumerate(message.proposes):
        if propose.stamp.request_id in seen:
            raise InvalidRequestError.of(f"proposes[{i}]", f"is the second of {propose.stamp.request_id} in this step")
        seen.add(propose.stamp.request_id)


def _rows(commit: drafter_pb2.SessionCommit, field: str, traits: Traits) -> FeatureRows:
    tensor = commit.feature_rows
    count, width = tensors.check(tensor, f"{field}.feature_rows", rank=2)
    if width != traits.feature_width:
        limit = traits.feature_width or f"absent, drafter kind {traits.kind} takes no rows"
        raise InvalidRequestError.of(f"{field}.feature_rows.shape", f"has width {width}; must be {limit}")
    if tensor.dtype == common_pb2.DTYPE_INT32:
        raise InvalidRequestError.of(f"{field}.feature_rows.dtype", "is int32; must be floating point")
    if commit.feature_fingerprint != traits.feature_fingerprint:
        theirs, ours = commit.feature_fingerprint, traits.feature_fingerprint
        raise InvalidRequestError.of(f"{field}.feature_fingerprint", f"is {theirs!r}; this drafter's is {ours!r}")
    return FeatureRows(commit.feature_base, (count, width), tensor.dtype, tensor.data)


def _wish(propose: drafter_pb2.Propose, field: str, traits: Traits) -> Wish:
    stamp = _stamp(propose.stamp, field)
    if propose.max_tokens < 1:
        raise InvalidRequestError.of(f"{field}.max_tokens", f"is {propose.max_tokens}; must be >= 1")
    wanted = min(propose.max_tokens, max(1, traits.max_draft_tokens))
    sampling = propose.sampling
    if not sampling.temperature > 0:
        return Wish(stamp, wanted)
    return Wish(stamp, wanted, _sampling(sampling, f"{field}.sampling"))


def _sampling(sampling: common_pb2.Sampling, field: str) -> DraftSampling:
    limits = (
        ("temperature", sampling.temperature, math.isfinite(sampling.temperature), "finite"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, ">= 0"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
    )
    for name, value, fits, limit in limits:
        if not fits:
            raise InvalidRequestError.of(f"{field}.{name}", f"is {value:g}; must be {limit}")
    return DraftSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        rule="ratio" if sampling.rule == types_pb2.RULE_RATIO else "match",
    )
