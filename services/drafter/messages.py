"""The drafter's edge: DraftRequest into a checked Step, Answer into DraftResponse."""

from __future__ import annotations

from collections.abc import Sequence

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2, drafter_pb2
from services.drafter.methods import FeatureRows, Traits
from services.drafter.step import Answer, Commit, Stamp, Step, Wish
from services.runtime import tensors

_ID_BYTES = 128


def to_step(message: drafter_pb2.DraftRequest, traits: Traits) -> Step:
    """The message in plain types. Raises InvalidRequestError naming the field that cannot be."""
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
        drafts=[drafter_pb2.Draft(stamp=_echo(stamp), token_ids=token_ids) for stamp, token_ids in answer.drafts],
        resyncs=[drafter_pb2.Resync(stamp=_echo(stamp), have=have) for stamp, have in answer.resyncs],
        compute_seconds=answer.compute_seconds,
    )


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


def _rows(commit: drafter_pb2.SessionCommit, field: str, traits: Traits) -> FeatureRows:
    tensor = commit.feature_rows
    count, width = tensors.check(tensor, f"{field}.feature_rows", rank=2)
    if width != traits.feature_width:
        limit = traits.feature_width or f"absent, drafter kind {traits.kind} takes no rows"
        raise InvalidRequestError.of(f"{field}.feature_rows.shape", f"has width {width}; must be {limit}")
    return FeatureRows(commit.feature_base, (count, width), tensor.dtype, tensor.data, commit.feature_fingerprint)


def _wish(propose: drafter_pb2.Propose, field: str, traits: Traits) -> Wish:
    stamp = _stamp(propose.stamp, field)
    if propose.max_tokens < 1:
        raise InvalidRequestError.of(f"{field}.max_tokens", f"is {propose.max_tokens}; must be >= 1")
    wanted = min(propose.max_tokens, max(1, traits.max_draft_tokens))
    return Wish(stamp, wanted, propose.sampling.temperature, propose.sampling.seed)
