"""What drafters that fill a whole block in one pass have in common: weights, sessions, from rows to drafts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from kadence.errors import CheckpointError, ConfigError
from kadence.internal import common_pb2
from services.drafter.backbone import Backbone
from services.drafter.draft_arch import DraftArch, read_draft_arch
from services.drafter.draft_kv import PAGE, DraftKV, pages_of
from services.drafter.draft_vocabulary import read_draft_vocabulary
from services.drafter.draft_weights import DraftWeights, load_draft
from services.drafter.methods import DraftItem, FeatureRows, NewTokens, ProposeItem, Setting, Traits, WireTensor
from services.drafter.path_selector import SIGNALS, DraftLaw, PathSelector
from services.drafter.target_tables import TargetTables, load_target_tables
from services.kernels.noise_ref import DRAFT, noise_key
from services.model.dtypes import resolve_dtype
from services.model.fetch import resolve
from services.model.linear import Linear, padded
from services.model.projection import ProjectionWeights
from services.model.shipped import find_drafter
from services.runtime import threads
from services.runtime.config import Frozen

MAX_ROWS = 4096
"""Most feature rows of one message; bounds how long one verifier's new prompts keep the others waiting."""
_WARM_SESSIONS = 32
_WARM_KEY = -1  # sessions count from 1
_DTYPES: dict[torch.dtype, int] = {
    torch.float32: common_pb2.DTYPE_FLOAT32,
    torch.bfloat16: common_pb2.DTYPE_BFLOAT16,
    torch.float16: common_pb2.DTYPE_FLOAT16,
}
_TORCH_DTYPES = {number: dtype for dtype, number in _DTYPES.items()}


class BlockOptions(Frozen):
    """Where the weights are, and how they run."""

    checkpoint: str = Field(min_length=1)
    """Folder with config.json and the weights, or the name of a shipped drafter."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto takes the model's."""
    draft_vocabulary: int = Field(0, ge=0)
    """How many of the most frequent tokens are drafted; 0 is all."""
    draft_vocabulary_file: str = ""
    """Tokens by frequency; empty takes draft_vocabulary.json in the checkpoint's folder."""
    threads: int = Field(0, ge=0, le=1024)
    """Compute threads; 0 takes OMP_NUM_THREADS, else one per available core."""


@dataclass(slots=True)
class BlockSession:
    """One session: its newest token, and the latest answer, which a repeated question gets again byte by byte."""

    anchor: int = -1
    asked: ProposeItem | None = None
    answer: DraftItem | None = None


class BlockMethod:
    """Drafts all positions in one pass over a block per session, all sessions at once."""

    Options = BlockOptions
    kind: ClassVar[str] = ""
    inline_tokens = -1

    def __init__(self, options: Any, setting: Setting) -> None:
        if setting.model is None:
            raise ConfigError(f"[model] path is required: drafter kind {self.kind} drafts for one model")
        torch.set_num_threads(options.threads or threads.available())
        folder = find_drafter(options.checkpoint)
        self._arch = arch = read_draft_arch(folder)
        if arch.kind != self.kind:
            raise ConfigError(f"[drafter] kind = {self.kind!r}: the checkpoint {folder} is a {arch.kind} drafter")
        self._dtype = resolve_dtype(setting.model.dtype if options.dtype == "auto" else options.dtype)
        tables = load_target_tables(resolve(setting.model.path), self._dtype)
        weights = load_draft(folder, arch, self._dtype)
        tables.check(weights)
        drafted = min(arch.max_draft_tokens, setting.max_draft_tokens)
        self._slots = arch.first_slot + drafted
        check_memory(arch, setting, self._slots, self._dtype)
        self._kv = DraftKV(arch, setting.kv_tokens, setting.max_sessions, self._slots, self._dtype)
        self._backbone = Backbone(
            weights, tables.embedding if weights.embedding is None else weights.embedding, self._kv
        )
        self._selector = _selector(options, folder, weights, tables)
        self._sessions: dict[int, BlockSession] = {}
        self.projection = wire_projection(weights.projection)
        self.traits = self._traits(weights, tables, setting, drafted)
        if weights.layers[0].qkv.packed:
            self._warm(min(setting.max_sessions, _WARM_SESSIONS), min(MAX_ROWS, setting.kv_tokens))
        else:
            self._warm(1, 1)  # a process's first pass takes long enough for a verifier to give the drafter up

    def open(self, key: int) -> None:
        """Begins without tokens and rows."""
        self._kv.open(key)
        self._sessions[key] = BlockSession()

    def commit(self, news: Sequence[NewTokens]) -> None:
        """Takes the rows of all sessions in one pass."""
        appends: dict[int, list[FeatureRows]] = {}
        for new in news:
            if new.token_ids:
                self._sessions[new.key].anchor = new.token_ids[-1]
            if new.rows is not None:
                appends.setdefault(new.key, []).append(new.rows)
        if appends:
            self._backbone.extend([(key, self._rows(rows), rows[0].base) for key, rows in appends.items()])

    @torch.inference_mode()
    def propose(self, items: Sequence[ProposeItem]) -> list[DraftItem]:
        """One pass over the blocks of all sessions that have not been asked just this before."""
        sessions = [self._sessions[item.key] for item in items]
        new = [(session, item) for session, item in zip(sessions, items, strict=True) if session.asked != item]
        within = [pair for pair in new if pair[1].base_length <= self._arch.max_position]
        for session, item in new:
            session.asked, session.answer = item, DraftItem([])
        if within:
            drafts = self._draft([item for _, item in within], [session.anchor for session, _ in within])
            for (session, _), draft in zip(within, drafts, strict=True):
                session.answer = draft
        return [session.answer or DraftItem([]) for session in sessions]

    def close(self, key: int) -> None:
        """Frees the session's pages."""
        del self._sessions[key]
        self._kv.close(key)

    def _draft(self, items: list[ProposeItem], anchors: list[int]) -> list[DraftItem]:
        # The whole block is always run: slots see each other, and fewer of them are another drafter.
        positions = [item.base_length - 1 for item in items]
        hidden = self._backbone.block([item.key for item in items], anchors, positions, self._slots)
        most, first = max(item.max_tokens for item in items), self._arch.first_slot
        laws = [draft_law(item) for item in items]
        drafted = self._selector.propose(hidden[:, first : first + most], anchors, laws)
        return [DraftItem(it.token_ids, it.q_ids, it.q, it.signals) for it in drafted]

    def _rows(self, parts: list[FeatureRows]) -> Tensor:
        """Rows [n, h] that follow each other."""
        tensors = [
            torch.frombuffer(bytearray(part.data), dtype=_TORCH_DTYPES[part.dtype]).view(part.shape) for part in parts
        ]
        return torch.cat(tensors).to(self._dtype)

    def _traits(self, weights: DraftWeights, tables: TargetTables, setting: Setting, drafted: int) -> Traits:
        return Traits(
            kind=self.kind,
            max_draft_tokens=drafted,
            block_size=self._slots,
            taps=self._arch.taps,
            feature_width=self._arch.hidden_size,
            feature_fingerprint=weights.projection.fingerprint,
            feature_norm_eps=weights.projection.eps,
            window=self._arch.window,
            vocab_size=self._arch.vocab_size,
            model_fingerprint=tables.fingerprint,
            kv_tokens=setting.kv_tokens,
            max_rows=MAX_ROWS,
            signals=SIGNALS,
            supports_ratio=True,
        )

    @torch.inference_mode()
    def _warm(self, sessions: int, rows: int) -> None:
        """Runs passes of every size once: oneDNN makes a kernel per size, which no verifier should wait for."""
        blank = torch.zeros((rows, self._arch.hidden_size), dtype=self._dtype)
        for count in _sizes(rows):
            self._kv.open(_WARM_KEY)
            self._backbone.extend([(_WARM_KEY, blank[:count], 0)])
            self._kv.close(_WARM_KEY)
        keys = list(range(_WARM_KEY, _WARM_KEY - sessions, -1))
        for key in keys:
            self._kv.open(key)
        for count in sorted({size // self._slots for size in _sizes(sessions * self._slots)} - {0}):
            self._backbone.block(keys[:count], [0] * count, [0] * count, self._slots)
        for key in keys:
            self._kv.close(key)
        greedy = DraftLaw(0.0, 0, 1.0, 0.0, None, 1)
        for count in _sizes(min(rows, sessions * self._slots)):
            self._selector.propose(blank[:count, None], [0] * count, [greedy] * count)


def draft_law(item: ProposeItem) -> DraftLaw:
    """How the session's draft is drawn.

    Rule match draws with the very noise that the target draws its own token with, which makes them agree; rule ratio
    with noise of its own, for what is drawn must be independent of what accepts it.
    """
    s, wanted = item.sampling, range(1, item.max_tokens + 1)
    noise: list[tuple[int, int]] | None = None
    if s.temperature > 0 and s.rule == "ratio":
        noise = [noise_key(s.seed, item.attempt, item.round, slot, DRAFT) for slot in wanted]
    elif s.temperature > 0:
        noise = [noise_key(s.seed, item.base_length - 1 + slot) for slot in wanted]
    return DraftLaw(s.temperature, s.top_k, s.top_p, s.min_p, noise, item.max_tokens)


def wire_projection(projection: ProjectionWeights) -> list[WireTensor]:
    """fc and hidden_norm as they are stored, under the names that drafter.proto gives them."""
    tensors = []
    for name, tensor in (("fc.weight", projection.fc), ("hidden_norm.weight", projection.norm)):
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is stored as {tensor.dtype}; must be one of {', '.join(map(str, _DTYPES))}")
        data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        tensors.append(WireTensor(name, _DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(data)))
    return tensors


def check_memory(arch: DraftArch, setting: Setting, slots: int, dtype: torch.dtype) -> None:
    """Raises ConfigError if context and blocks alone are more than the machine has."""
    per_token = arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * dtype.itemsize
    takes = pages_of(arch, setting.kv_tokens, setting.max_sessions, slots) * PAGE * per_token
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if takes > have:
        raise ConfigError(
            f"[drafter] kv_tokens = {setting.kv_tokens} and max_sessions = {setting.max_sessions}: "
            f"take {takes / 2**30:.0f} GiB, the machine has {have / 2**30:.0f} GiB"
        )


def _selector(options: BlockOptions, folder: Path, weights: DraftWeights, tables: TargetTables) -> PathSelector:
    head = tables.head if weights.head is None else weights.head
    if not options.draft_vocabulary:
        return PathSelector(weights.selector, Linear(head), weights.arch)
    path = Path(os.path.expanduser(options.draft_vocabulary_file or folder / "draft_vocabulary.json"))
    vocabulary = read_draft_vocabulary(path, options.draft_vocabulary, weights.arch.vocab_size)
    return PathSelector(weights.selector, Linear(head[vocabulary]), weights.arch, vocabulary)


def _sizes(most: int) -> list[int]:
    """Numbers of rows that passes of up to `most` rows are padded to."""
    return sorted({min(padded(rows), most) for rows in range(1, most + 1)})
