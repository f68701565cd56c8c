"""The drafter's edge refuses what cannot be, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2 as common
from kadence.internal import drafter_pb2 as pb
from services.drafter.messages import from_answer, to_step
from services.drafter.methods import FeatureRows, Traits
from services.drafter.step import Answer, Commit, Stamp, Step, Wish

NGRAM = Traits(kind="ngram", max_draft_tokens=16)
WIDE = Traits(kind="wide", max_draft_tokens=16, feature_width=2, vocab_size=100)
STAMP = common.Stamp(request_id="r", attempt=1, round=2, base_length=3)
BF16 = common.DTYPE_BFLOAT16


def tensor(dtype: Any = BF16, shape: tuple[int, ...] = (3, 2), size: int = 12) -> common.Tensor:
    return common.Tensor(dtype=dtype, shape=shape, data=bytes(size))


def test_plain_types() -> None:
    message = pb.DraftRequest(
        step=9,
        closes=[pb.SessionClose(stamp=STAMP)],
        opens=[pb.SessionOpen(stamp=STAMP)],
        commits=[
            pb.SessionCommit(
                stamp=STAMP, token_ids=[4, 5], feature_rows=tensor(), feature_base=1, feature_fingerprint="f"
            )
        ],
        proposes=[pb.Propose(stamp=STAMP, max_tokens=7, sampling=common.Sampling(temperature=0.5, seed=11))],
    )
    stamp = Stamp("r", 1, 2, 3)
    assert to_step(message, WIDE) == Step(
        9,
        [stamp],
        [stamp],
        [Commit(stamp, [4, 5], FeatureRows(1, (3, 2), BF16, bytes(12), "f"))],
        [Wish(stamp, 7, 0.5, 11)],
    )


def test_answer() -> None:
    stamp = Stamp("r", 1, 2, 3)
    message = from_answer(Answer(9, [(stamp, [4, 5])], [(stamp, 2)], 0.25))
    assert message == pb.DraftResponse(
        step=9,
        drafts=[pb.Draft(stamp=STAMP, token_ids=[4, 5])],
        resyncs=[pb.Resync(stamp=STAMP, have=2)],
        compute_seconds=0.25,
    )


def test_wishes_are_cut_to_the_limit() -> None:
    message = pb.DraftRequest(proposes=[pb.Propose(stamp=STAMP, max_tokens=1000)])
    assert to_step(message, NGRAM).wishes[0].max_tokens == 16


def commit(**fields: Any) -> pb.DraftRequest:
    return pb.DraftRequest(commits=[pb.SessionCommit(**{"stamp": STAMP, "token_ids": [1], **fields})])


BAD = [
    (NGRAM, commit(token_ids=[1, -5]), "commits[0].token_ids[1]: is -5; must be >= 0"),
    (WIDE, commit(token_ids=[100]), "commits[0].token_ids[0]: is 100; must be 0..99"),
    (NGRAM, commit(feature_rows=tensor()), "must be absent, drafter kind ngram takes no rows"),
    (WIDE, commit(feature_rows=tensor(shape=(2, 3))), "commits[0].feature_rows.shape: has width 3; must be 2"),
    (WIDE, commit(feature_rows=tensor(dtype=0)), "commits[0].feature_rows.dtype: is 0"),
    (WIDE, commit(feature_rows=tensor(dtype=77)), "commits[0].feature_rows.dtype: is 77"),
    (WIDE, commit(feature_rows=tensor(shape=(6,))), "commits[0].feature_rows.shape: is [6]; must be 2 sizes"),
    (WIDE, commit(feature_rows=tensor(shape=(-3, -2))), "commits[0].feature_rows.shape: is [-3, -2]"),
    (WIDE, commit(feature_rows=tensor(size=11)), "commits[0].feature_rows.data: has 11 bytes; shape and dtype need 12"),
    (NGRAM, commit(stamp=common.Stamp()), "commits[0].stamp.request_id: has 0 characters; must be 1..128"),
    (NGRAM, pb.DraftRequest(opens=[pb.SessionOpen(stamp=common.Stamp(request_id="x" * 129))]), "opens[0].stamp"),
    (NGRAM, pb.DraftRequest(closes=[pb.SessionClose()]), "closes[0].stamp.request_id"),
    (NGRAM, pb.DraftRequest(proposes=[pb.Propose(stamp=STAMP)]), "proposes[0].max_tokens: is 0; must be >= 1"),
]


@pytest.mark.parametrize(("traits", "message", "says"), BAD, ids=[says for _, _, says in BAD])
def test_what_cannot_be(traits: Traits, message: pb.DraftRequest, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        to_step(message, traits)
    assert says in caught.value.message and caught.value.violations
