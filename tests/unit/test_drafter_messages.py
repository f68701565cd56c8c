"""The drafter's edge refuses what cannot be, naming the field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kadence.errors import InvalidRequestError
from kadence.internal import common_pb2 as common
from kadence.internal import drafter_pb2 as pb
from kadence.v1 import types_pb2
from services.drafter.messages import from_answer, pieces, to_step
from services.drafter.methods import DraftItem, DraftSampling, FeatureRows, Traits, WireTensor
from services.drafter.step import Answer, Commit, Stamp, Step, Wish

NGRAM = Traits(kind="ngram", max_draft_tokens=16)
WIDE = Traits(kind="wide", max_draft_tokens=16, feature_width=2, vocab_size=100, feature_fingerprint="f", max_rows=5)
STAMP = common.Stamp(request_id="r", attempt=1, round=2, base_length=3)
SAMPLING = common.Sampling(
    temperature=0.5, seed=11, top_k=9, top_p=0.75, min_p=0.25, rule=types_pb2.RULE_RATIO, max_tokens=4
)
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
        proposes=[pb.Propose(stamp=STAMP, max_tokens=7, sampling=SAMPLING)],
    )
    stamp = Stamp("r", 1, 2, 3)
    assert to_step(message, WIDE) == Step(
        9,
        [stamp],
        [stamp],
        [Commit(stamp, [4, 5], FeatureRows(1, (3, 2), BF16, bytes(12)))],
        [Wish(stamp, 7, DraftSampling(0.5, 9, 0.75, 0.25, 11, "ratio"))],
    )


def test_answer() -> None:
    stamp = Stamp("r", 1, 2, 3)
    law = DraftItem(
        [4, 5],
        np.array([[4, 7], [5, 6]], np.int32),
        np.array([[0.25, 0.75], [1, 0]], np.float32),
        np.array([[0.5], [2.0]], np.float32),
    )
    answer = Answer(9, [(stamp, law), (stamp, DraftItem([8])), (stamp, DraftItem([]))], [(stamp, 2)], 0.25)
    message = from_answer(answer)
    first, second, empty = message.drafts
    assert (list(first.token_ids), first.stamp) == ([4, 5], STAMP)
    for tensor, dtype, want in (
        (first.q.token_ids, common.DTYPE_INT32, law.q_ids),
        (first.q.probabilities, common.DTYPE_FLOAT32, law.q),
        (first.signals, common.DTYPE_FLOAT32, law.signals),
    ):
        assert want is not None and tensor.dtype == dtype
        assert np.array_equal(np.frombuffer(tensor.data, want.dtype).reshape(tensor.shape), want)
    assert second == pb.Draft(stamp=STAMP, token_ids=[8]) and empty == pb.Draft(stamp=STAMP)
    assert list(message.resyncs) == [pb.Resync(stamp=STAMP, have=2)]
    assert (message.step, message.compute_seconds) == (9, 0.25)


def test_greedy_is_what_has_no_temperature() -> None:
    for sampling in (common.Sampling(), common.Sampling(top_p=0.5, seed=3)):
        message = pb.DraftRequest(proposes=[pb.Propose(stamp=STAMP, max_tokens=1, sampling=sampling)])
        assert to_step(message, NGRAM).wishes[0].sampling == DraftSampling()


def test_pieces_of_a_projection() -> None:
    data = bytes(range(256)) * ((9 << 20) // 256)
    sent = list(pieces(WireTensor("fc.weight", BF16, (9, 1 << 19), memoryview(data))))
    assert [(it.name, it.dtype, list(it.shape)) for it in sent] == [("fc.weight", BF16, [9, 1 << 19])] * 3
    assert [it.offset for it in sent] == [0, 4 << 20, 8 << 20] and b"".join(it.data for it in sent) == data


def test_wishes_are_cut_to_the_limit() -> None:
    message = pb.DraftRequest(proposes=[pb.Propose(stamp=STAMP, max_tokens=1000)])
    assert to_step(message, NGRAM).wishes[0].max_tokens == 16


def commit(**fields: Any) -> pb.DraftRequest:
    own = {"stamp": STAMP, "token_ids": [1], "feature_fingerprint": "f"}
    return pb.DraftRequest(commits=[pb.SessionCommit(**{**own, **fields})])


def sampled(**fields: Any) -> pb.DraftRequest:
    sampling = common.Sampling(**{"temperature": 1.0, "top_p": 1.0, **fields})
    return pb.DraftRequest(proposes=[pb.Propose(stamp=STAMP, max_tokens=1, sampling=sampling)])


TWICE = pb.Propose(stamp=STAMP, max_tokens=1)
BAD = [
    (NGRAM, commit(token_ids=[1, -5]), "commits[0].token_ids[1]: is -5; must be >= 0"),
    (WIDE, commit(token_ids=[100]), "commits[0].token_ids[0]: is 100; must be 0..99"),
    (NGRAM, commit(feature_rows=tensor()), "must be absent, drafter kind ngram takes no rows"),
    (WIDE, commit(feature_rows=tensor(shape=(2, 3))), "commits[0].feature_rows.shape: has width 3; must be 2"),
    (WIDE, commit(feature_rows=tensor(dtype=0)), "commits[0].feature_rows.dtype: is 0"),
    (WIDE, commit(feature_rows=tensor(dtype=77)), "commits[0].feature_rows.dtype: is 77"),
    (WIDE, commit(feature_rows=tensor(shape=(4,))), "commits[0].feature_rows.shape: is [4]; must be 2 sizes"),
    (WIDE, commit(feature_rows=tensor(shape=(-3, -2))), "commits[0].feature_rows.shape: is [-3, -2]"),
    (WIDE, commit(feature_rows=tensor(size=11)), "commits[0].feature_rows.data: has 11 bytes; shape and dtype need 12"),
    (WIDE, commit(feature_rows=tensor(common.DTYPE_INT32, size=24)), "feature_rows.dtype: is int32"),
    (WIDE, commit(feature_rows=tensor(), feature_fingerprint="g"), "is 'g'; this drafter's is 'f'"),
    (WIDE, commit(feature_rows=tensor(shape=(6, 2))), "commits: have 6 feature rows; a message may have 5"),
    (NGRAM, sampled(temperature=math.inf), "proposes[0].sampling.temperature: is inf; must be finite"),
    (NGRAM, sampled(top_p=1.5), "proposes[0].sampling.top_p: is 1.5; must be in (0, 1]"),
    (NGRAM, sampled(top_k=-1), "proposes[0].sampling.top_k: is -1; must be >= 0"),
    (NGRAM, sampled(min_p=math.nan), "proposes[0].sampling.min_p: is nan; must be in [0, 1]"),
    (NGRAM, pb.DraftRequest(proposes=[TWICE, TWICE]), "proposes[1]: is the second of r in this step"),
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
