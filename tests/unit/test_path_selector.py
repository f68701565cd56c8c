"""Drafts against the formulas of the draft-model contracts (sections 3.6, 4.2), evaluated anew in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from services.drafter.draft_arch import DraftArch
from services.drafter.draft_weights import SelectorWeights
from services.drafter.path_selector import MARGIN_LIMIT, SIGNALS, Drafted, DraftLaw, PathSelector
from services.kernels.noise_ref import noise_key
from services.model import probs
from services.model.linear import Linear
from services.model.rope_parameters import RopeParameters
from tests.support import noise
from tests.support.mock_device import MockCuda
from tests.support.stats import chi_square_p

HIDDEN, RANK, SEED = 8, 4, 77
ARCH = DraftArch(
    kind="dflash2",
    hidden_size=HIDDEN,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=50,
    max_position=64,
    rms_norm_eps=1e-6,
    rope=RopeParameters(10000.0),
    attention_bias=False,
    block_size=8,
    taps=(0,),
    num_target_layers=2,
    target_hidden_size=8,
    mask_token_id=0,
    windows=(0,),
    causal=(False,),
    first_slot=1,
    conv_taps=0,
    conv_group=0,
    selector_rank=RANK,
    selector_top_k=16,
)
GREEDY = DraftLaw(0.0, 0, 1.0, 0.0, None, 3)
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 3, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.1, 6, 0.7, 0.05),
    (2.0, 1, 1.0, 0.0),
]
"""Temperature, top-k, top-p, min-p."""


@dataclass
class World:
    """Random weights, and hidden states of `sessions` blocks of three positions."""

    vocab: int = 50
    sessions: int = 4
    top_k: int = 16
    dtype: torch.dtype = torch.float32
    scale: float = 2.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        self.hidden = draw(self.sessions, 3, HIDDEN)
        self.head = draw(self.vocab, HIDDEN) * self.scale / HIDDEN**0.5
        self.projection = draw(RANK, HIDDEN) / HIDDEN**0.5
        self.predecessor, self.successor = draw(self.vocab, RANK), draw(self.vocab, RANK)
        self.anchors = torch.randint(self.vocab, (self.sessions,), generator=generator).tolist()

    def selector(self, *, edges: bool = True, vocabulary: list[int] | None = None, **arch: Any) -> PathSelector:
        weights = SelectorWeights(Linear(self.projection), self.predecessor, self.successor) if edges else None
        head = Linear(self.head if vocabulary is None else self.head[vocabulary])
        ids = None if vocabulary is None else torch.tensor(vocabulary)
        return PathSelector(weights, head, replace(ARCH, selector_top_k=self.top_k, **arch), ids)

    def scores(self, session: int, k: int, before: int, *, edges: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """(U_k, S_k(. | before)) over the whole vocabulary."""
        hidden = self.hidden[session, k].double()
        unary = self.head.double() @ hidden
        edge = self.successor.double() @ (self.predecessor[before].double() * (self.projection.double() @ hidden))
        return unary.numpy(), (unary + edge).numpy() if edges else unary.numpy()


def law(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = SEED) -> DraftLaw:
    keys = [noise_key(seed, 10 + k) for k in range(3)] if temperature else None
    return DraftLaw(temperature, top_k, top_p, min_p, keys, 3)


def best(unary: np.ndarray, k: int) -> np.ndarray:
    return np.lexsort((np.arange(len(unary)), -unary))[:k]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize("edges", [True, False])
def test_greedy_takes_the_best_after_the_token_chosen_before(edges: bool) -> None:
    world = World()
    drafts = world.selector(edges=edges).propose(world.hidden, world.anchors, [GREEDY] * 4)
    for i, draft in enumerate(drafts):
        before, wanted = world.anchors[i], []
        for k in range(3):
            unary, scores = world.scores(i, k, before, edges=edges)
            ids = best(unary, 16)
            before = int(ids[scores[ids].argmax()])
            wanted.append(before)
        assert draft.token_ids == wanted
        assert draft.q is None and draft.q_ids is None
    if edges:
        plain = [best(world.scores(i, k, 0)[0], 1)[0] for i in range(4) for k in range(3)]
        assert [token for draft in drafts for token in draft.token_ids] != plain, "the edges decide nothing here"


@pytest.mark.parametrize("filters", [(0.4, 0, 1.0, 0.0), *FILTERS])
def test_sampled_tokens_and_their_law(filters: tuple[float, int, float, float]) -> None:
    """The filters see what the edges made of the candidates' scores."""
    world = World()
    drafts = world.selector().propose(world.hidden, world.anchors, [law(*filters, seed=i) for i in range(4)])
    for i, draft in enumerate(drafts):
        assert draft.q is not None and draft.q_ids is not None
        assert draft.q.dtype == np.float32 and draft.q_ids.dtype == np.int32
        before = world.anchors[i]
        for k in range(3):
            unary, scores = world.scores(i, k, before)
            ids = best(unary, 16)
            scaled = (scores[ids] - scores[ids].max()) / filters[0]
            kept = probs.keep(torch.from_numpy(scaled), *filters[1:]).tolist()
            q = np.zeros(16)
            q[kept] = softmax(scaled[kept])
            assert draft.q_ids[k].tolist() == ids.tolist()
            np.testing.assert_allclose(draft.q[k], q, atol=1e-6)
            before = int(ids[kept][(np.log(q[kept]) + noise.gumbel(i, 10 + k, ids[kept])).argmax()])
            assert draft.token_ids[k] == before


def test_paths_have_the_frequencies_of_the_product_of_q() -> None:
    """Every path of three candidates at three positions, counted over 20,000 walks."""
    world = World(vocab=12, sessions=1, top_k=3, scale=0.5)
    count = 20_000
    hidden, anchors = world.hidden.expand(count, -1, -1), world.anchors * count
    drafts = world.selector().propose(hidden, anchors, [law(seed=seed) for seed in range(count)])
    columns = [best(world.scores(0, k, 0)[0], 3) for k in range(3)]
    paths: dict[tuple[int, ...], float] = {}
    for path in itertools.product(*columns):
        mass = 1.0
        for k, before in enumerate((world.anchors[0], *path[:-1])):
            q = softmax(world.scores(0, k, int(before))[1][columns[k]])
            mass *= q[columns[k].tolist().index(path[k])]
        paths[tuple(int(token) for token in path)] = mass
    assert abs(sum(paths.values()) - 1) < 1e-9
    walked = [tuple(draft.token_ids) for draft in drafts]
    assert chi_square_p(walked, paths) > 1e-3
    unary = {
        p: math.prod(softmax(world.scores(0, k, 0)[0][columns[k]])[columns[k].tolist().index(p[k])] for k in range(3))
        for p in paths
    }
    assert chi_square_p(walked, unary) < 1e-6, "the walk would pass for one without edges"
    sums = np.stack([draft.q for draft in drafts if draft.q is not None]).sum(axis=-1)
    np.testing.assert_allclose(sums, 1, atol=1e-6)


@pytest.mark.parametrize("filters", FILTERS)
def test_narrowed_as_the_target_narrows(filters: tuple[float, int, float, float]) -> None:
    """Where all tokens are candidates and none depends on the one before, target and drafter draw alike."""
    world = World(vocab=16, sessions=16)
    temperature, top_k, top_p, min_p = filters
    drafts = world.selector(edges=False).propose(
        world.hidden, world.anchors, [law(*filters, seed=i) for i in range(16)]
    )
    for i, draft in enumerate(drafts):
        logits = world.hidden[i] @ world.head.T
        laws = [probs.RowLaw(temperature, top_k, top_p, i, 10 + k, min_p) for k in range(3)]
        assert draft.token_ids == probs.draw(logits, laws)
        for k in range(3):
            scaled = probs.scale(logits[k], temperature)
            kept = probs.keep(scaled, top_k, top_p, min_p)
            assert draft.q is not None and draft.q_ids is not None
            assert draft.q_ids[k][draft.q[k] > 0].tolist() == kept.tolist()
            np.testing.assert_allclose(draft.q[k][draft.q[k] > 0], torch.softmax(scaled[kept], 0), atol=1e-6)


def test_laws_do_not_mix() -> None:
    """Sessions of every kind in one batch draft what they draft alone."""
    world = World(sessions=8)
    laws = [law(*filters, seed=i) for i, filters in enumerate(FILTERS)] + [GREEDY, replace(law(0.5), count=1)]
    laws[7] = replace(laws[7], noise=(laws[7].noise or [])[:1])
    selector = world.selector()
    together = selector.propose(world.hidden, world.anchors, laws)
    for i in range(8):
        alone = selector.propose(world.hidden[i : i + 1], world.anchors[i : i + 1], [laws[i]])[0]
        assert together[i].token_ids == alone.token_ids
        assert len(alone.token_ids) == len(alone.signals) == laws[i].count
        np.testing.assert_allclose(together[i].signals, alone.signals, atol=1e-5)
        assert (together[i].q is None) == (laws[i].temperature == 0)
        if alone.q is not None and together[i].q is not None:
            assert len(alone.q) == laws[i].count
            np.testing.assert_allclose(together[i].q, alone.q, atol=1e-6)


def test_ties_go_to_the_lower_rank() -> None:
    world = World(vocab=40)
    world.head[:] = world.head[0]  # every token scores the same
    drafts = world.selector(edges=False).propose(world.hidden, world.anchors, [GREEDY] * 4)
    assert all(draft.token_ids == [0, 0, 0] for draft in drafts)


def test_without_successors_every_slot_goes_for_itself() -> None:
    world = World()
    world.successor.zero_()
    drafts = world.selector().propose(world.hidden, world.anchors, [GREEDY] * 4)
    wanted = (world.hidden @ world.head.T).argmax(dim=-1).tolist()
    assert [draft.token_ids for draft in drafts] == wanted


def test_first_token_depends_on_the_anchor() -> None:
    world = World(sessions=1)
    selector = world.selector()
    laws = [selector.propose(world.hidden, [anchor], [law()])[0] for anchor in range(50)]
    assert len({draft.q[0].tobytes() for draft in laws if draft.q is not None}) == 50


def test_multiplier_comes_before_softcap_and_both_before_the_edges() -> None:
    world = World(sessions=1)
    draft = world.selector(output_multiplier=3.0, softcap=2.5).propose(world.hidden, world.anchors, [law()])[0]
    unary, scores = world.scores(0, 0, world.anchors[0])
    capped = 2.5 * np.tanh(3.0 * unary / 2.5)
    assert draft.q is not None and draft.q_ids is not None
    ids = draft.q_ids[0]
    assert sorted(ids.tolist()) == sorted(best(unary, 16).tolist())
    np.testing.assert_allclose(draft.q[0], softmax((capped + scores - unary)[ids]), atol=1e-5)
    assert abs(draft.signals[0, SIGNALS.index("unary_top1")] - softmax(capped).max()) < 1e-5


def test_own_vocabulary() -> None:
    """Candidates are the best of it, under the ids and codebook rows of the whole one."""
    world = World(sessions=1)
    vocabulary = list(range(1, 50, 2))
    draft = world.selector(vocabulary=vocabulary).propose(world.hidden, world.anchors, [law()])[0]
    before = world.anchors[0]
    for k in range(3):
        unary, scores = world.scores(0, k, before)
        ids = np.array(vocabulary)[best(unary[vocabulary], 16)]
        assert draft.q is not None and draft.q_ids is not None
        assert draft.q_ids[k].tolist() == ids.tolist()
        np.testing.assert_allclose(draft.q[k], softmax(scores[ids]), atol=1e-6)
        before = draft.token_ids[k]
    few = world.selector(vocabulary=[3, 30]).propose(world.hidden, world.anchors, [law()])[0]
    assert few.q_ids is not None and few.q_ids.shape == (3, 2)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_signals(temperature: float) -> None:
    world = World()
    filtered = replace(law(temperature), top_k=2)  # signals are of the law before filters
    for i, draft in enumerate(world.selector().propose(world.hidden, world.anchors, [filtered] * 4)):
        for k, before in enumerate([world.anchors[i], *draft.token_ids[:-1]]):
            unary, scores = world.scores(i, k, before)
            ids = best(unary, 16)
            p, q = softmax(unary), softmax(scores[ids] / (temperature or 1.0))
            first, second = sorted(q)[::-1][:2]
            wanted = {
                "top1": first,
                "entropy": -(q * np.log(q)).sum(),
                "margin": math.log(first / second),
                "unary_top1": p.max(),
                "unary_margin": math.log(p.max() / (1 - p.max())),
                "agree": float(q.argmax() == 0),
                "mass": p[ids].sum(),
            }
            np.testing.assert_allclose(draft.signals[k], [wanted[name] for name in SIGNALS], atol=2e-5)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_signals_see_nothing_of_their_own_token_or_later_ones(k: int) -> None:
    """Tokens from position k on are drawn again and again: law and signals up to k stay, bit by bit."""
    world = World(sessions=1)
    selector = world.selector()

    def drawn(again: int) -> Drafted:
        keys = [noise_key(SEED, j) if j < k else noise_key(SEED + again, j, 1) for j in range(3)]
        return selector.propose(world.hidden, world.anchors, [DraftLaw(1.5, 0, 1.0, 0.0, keys, 3)])[0]

    drafts = [drawn(again) for again in range(20)]
    assert len({draft.token_ids[k] for draft in drafts}) > 3
    assert len({draft.signals[: k + 1].tobytes() for draft in drafts}) == 1
    assert len({draft.q[: k + 1].tobytes() for draft in drafts if draft.q is not None}) == 1
    if k < 2:
        assert len({draft.signals[k + 1].tobytes() for draft in drafts}) > 3, "later signals follow the token"


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1.0, 100.0, 0.0])
def test_finite_whatever_the_scores(temperature: float) -> None:
    for scale in (0.0, 1.0, 1000.0):
        world = World(scale=scale)
        for draft in world.selector().propose(world.hidden, world.anchors, [law(temperature, 0, 0.9)] * 4):
            assert np.isfinite(draft.signals).all() and np.abs(draft.signals).max() <= MARGIN_LIMIT
            if draft.q is not None and draft.q_ids is not None:
                np.testing.assert_allclose(draft.q.sum(axis=-1), 1, atol=1e-5)
                chosen = draft.q_ids == np.array(draft.token_ids)[:, None]
                assert (draft.q[chosen] > 0).all()


def test_bfloat16() -> None:
    """Laws are those of the rounded weights, up to the rounding of logits and hidden projection."""
    exact, rounded = World(sessions=11), World(sessions=11, dtype=torch.bfloat16)
    for name in ("hidden", "head", "projection", "predecessor", "successor"):
        setattr(exact, name, getattr(rounded, name).float())
    laws = [law(seed=i) for i in range(11)]
    ours = rounded.selector().propose(rounded.hidden, rounded.anchors, laws)
    theirs = exact.selector().propose(exact.hidden, exact.anchors, laws)
    for i, (draft, wanted) in enumerate(zip(ours, theirs, strict=True)):
        assert draft.q is not None and wanted.q is not None and draft.q_ids is not None and wanted.q_ids is not None
        mine, other = np.zeros(50), np.zeros(50)
        mine[draft.q_ids[0]], other[wanted.q_ids[0]] = draft.q[0], wanted.q[0]
        assert np.abs(mine - other).max() < 0.03, i


def test_on_a_device() -> None:
    world = World()
    wanted = world.selector().propose(world.hidden, world.anchors, [law(0.8, 5)] * 4)
    with MockCuda():
        for name in ("hidden", "head", "projection", "predecessor", "successor"):
            setattr(world, name, getattr(world, name).to("cuda"))
        drafts = world.selector().propose(world.hidden, world.anchors, [law(0.8, 5)] * 4)
    assert [draft.token_ids for draft in drafts] == [draft.token_ids for draft in wanted]
