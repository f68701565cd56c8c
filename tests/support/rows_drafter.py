"""A scripted drafter that wants feature rows: keeps those of each session, and checks how they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kadence.internal import common_pb2
from kadence.internal import drafter_pb2 as pb
from services.model.projection import ProjectionWeights
from tests.support.scripted_drafter import Propose, ScriptedDrafter
from tests.support.tiny_llama import TinyLlama

MOST_BYTES = 4 * 2**20


def projection(seed: int = 0, taps: tuple[int, ...] = (0, 2), width: int = 24, hidden: int = 64) -> ProjectionWeights:
    """Random weights for a target of that hidden size."""
    generator = torch.Generator().manual_seed(seed)
    fc = torch.randn((width, len(taps) * hidden), generator=generator)
    return ProjectionWeights(taps, fc, 1 + 0.1 * torch.randn(width, generator=generator), 1e-6)


@torch.inference_mode()
def rows_by_formula(llama: TinyLlama, weights: ProjectionWeights, tokens: list[int]) -> Tensor:
    """Feature rows [n, width] of a text: transformers' hidden states through draft-model contracts, section 3.2."""
    states = llama.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([states[tap + 1][0] for tap in weights.taps], dim=-1) @ weights.fc.T
    return features / torch.sqrt(features.pow(2).mean(-1, keepdim=True) + weights.eps) * weights.norm


@dataclass
class Told:
    """What a session was told when it was last asked."""

    tokens: list[int]
    first: int
    rows: Tensor


@dataclass
class Rows:
    """The rows of a session so far."""

    first: int = -1
    parts: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Position behind the last one."""
        return max(0, self.first) + sum(len(part) for part in self.parts)


class RowsDrafter(ScriptedDrafter):
    """Drafts only for sessions whose rows reach the newest token's position; asserts that nobody asks before."""

    def __init__(self, propose: Propose, weights: ProjectionWeights, **limits: Any) -> None:
        self.weights = weights
        self.limits = limits
        self.rows: dict[str, Rows] = {}
        self.lost: set[str] = set()
        """Sessions that lost rows, so that the next ones leave a gap."""
        self.told: dict[str, Told] = {}
        self.asked: list[tuple[str, int]] = []
        """Who was served, and at which length."""
        super().__init__(propose)

    def reconnect(self) -> None:
        super().reconnect()
        self.rows = {}
        assert self.connection is not None
        self.connection = replace(
            self.connection, rows=self.weights.fingerprint, projection=self.weights, **self.limits
        )

    def have(self, name: str) -> int:
        return min(super().have(name), self.rows[name].end + 1) if name in self.rows else 0

    def keep(self, name: str, rows: int) -> None:
        """Loses the rows of a session, but for the first ones."""
        held = self.rows[name]
        held.parts = [torch.cat(held.parts)[:rows]] if rows else []
        self.lost.add(name)

    def send(self, request: pb.DraftRequest, generation: int) -> None:
        self._check_size(request)
        for close in request.closes:
            self.rows.pop(close.stamp.request_id, None)
        for opening in request.opens:
            self.rows[opening.stamp.request_id] = Rows()
        for commit in request.commits:
            if commit.HasField("feature_rows") and commit.stamp.request_id in self.rows:
                self._append(commit.stamp.request_id, commit)
        self._check_room()
        super().send(request, generation)

    def answer(self, response: pb.DraftResponse) -> None:
        for draft in response.drafts:
            name = draft.stamp.request_id
            held, tokens = self.rows[name], list(self.sessions[name])
            self.asked.append((name, len(tokens)))
            self.told[name] = Told(tokens, max(0, held.first), torch.cat([torch.empty(0, 24), *held.parts]))
            assert held.end == len(tokens) - 1, "rows beyond the newest token, or too few"
        super().answer(response)

    def _append(self, name: str, commit: pb.SessionCommit) -> None:
        held, tensor = self.rows[name], commit.feature_rows
        assert tensor.dtype == common_pb2.DTYPE_FLOAT32 and tensor.shape[1] == len(self.weights.fc)
        assert commit.feature_fingerprint == self.weights.fingerprint, "rows of something else"
        part = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(*tensor.shape)
        if held.first < 0:
            held.first = commit.feature_base
        if name in self.lost:
            self.lost.remove(name)
            return  # behind a gap; a resync is the answer
        assert commit.feature_base == held.end, "a gap, or rows that were sent already"
        held.parts.append(part)

    def _check_room(self) -> None:
        most, window = self.limits.get("kv_tokens", 0), self.limits.get("window", 0)
        held = [min(rows.end, window - 1) if window else rows.end for rows in self.rows.values()]
        assert not most or sum(held) <= most, "more tokens of context than there is room for"

    def _check_size(self, request: pb.DraftRequest) -> None:
        rows = [commit.feature_rows for commit in request.commits if commit.HasField("feature_rows")]
        most = self.limits.get("max_rows", 0)
        assert sum(len(tensor.data) for tensor in rows) <= MOST_BYTES
        assert not most or sum(tensor.shape[0] for tensor in rows) <= most
