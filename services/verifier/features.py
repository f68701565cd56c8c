"""Feature rows: what a drafter reads of the target's work, one row beside each token's K/V."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.model.projection import Projection, ProjectionWeights
from services.verifier.paged_kv import PageList, PagePool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows [first, first + count) of one request, as bytes (contiguous, the machine's own order)."""

    first: int
    count: int
    width: int
    dtype: torch.dtype
    fingerprint: str
    data: bytes


class FeatureStore:
    """A row for every cache slot, made by one drafter's projection; idle until there is one.

    Which pages hold rows of which projection is marked in the pool. Belongs to the engine's thread.
    """

    def __init__(self, pool: PagePool, dtype: torch.dtype) -> None:
        self._pool = pool
        self._dtype = dtype
        self._weights: ProjectionWeights | None = None
        self._projection: Projection | None = None
        self._rows = torch.empty((0, 0), dtype=dtype)
        self.fingerprint = ""
        """Of the projection in use; "" without one."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `store` wants; none without a projection."""
        return () if self._projection is None else self._projection.taps

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self._rows.shape[1] * self._dtype.itemsize

    def use(self, weights: ProjectionWeights | None) -> None:
        """Makes rows with `weights` from now on; those of other weights stay where they are and keep their marks."""
        if weights is self._weights:
            return
        self._weights = weights
        self._projection = None if weights is None else Projection(weights, self._dtype)
        self.fingerprint = "" if weights is None else weights.fingerprint
        if self._projection is not None and self._projection.width != self._rows.shape[1]:
            # The system maps zero pages only when they are touched: memory grows with the rows there are.
            self._rows = torch.zeros(
                (self._pool.num_pages * self._pool.page_size, self._projection.width), dtype=self._dtype
            )
            self._pool.forget_rows()
            _log.info(
                "feature rows: %d tokens of %d bytes (%.0f MiB)",
                len(self._rows),
                self.row_bytes,
                self._rows.nbytes / 2**20,
            )

    def store(self, slots: Tensor, tapped: list[Tensor]) -> None:
        """Makes the rows of the step's tokens: cache slots [n] (page * page_size + offset), hidden states [n, h]."""
        if self._projection is not None:
            self._rows.index_copy_(0, slots, self._projection(tapped))

    def has(self, pages: PageList, first: int, last: int) -> bool:
        """Whether rows [first, last) of a request were all made by the projection in use."""
        assert last <= pages.committed, "rows of tokens that are not committed"
        size = self._pool.page_size
        held = pages.pages[first // size : self._pool.pages_for(last)] if first < last else []
        return all(self._pool.rows_of(page) == self.fingerprint for page in held)

    def read(self, spans: Sequence[tuple[PageList, int, int]]) -> list[RowSlice]:
        """Rows [first, last) of each (pages, first, last)."""
        if not spans:
            return []
        index = np.concatenate([self._slots(pages, first, last) for pages, first, last in spans])
        rows = self._rows.index_select(0, torch.from_numpy(index)).view(torch.uint8).numpy()
        slices, row, width = [], 0, self._rows.shape[1]
        for _, first, last in spans:
            data = rows[row : row + last - first].tobytes()
            slices.append(RowSlice(first, last - first, width, self._dtype, self.fingerprint, data))
            row += last - first
        return slices

    def _slots(self, pages: PageList, first: int, last: int) -> np.ndarray:
        size = self._pool.page_size
        position = np.arange(first, last)
        table = np.asarray(pages.pages[first // size : self._pool.pages_for(last)], dtype=np.int64)
        return table[position // size - first // size] * size + position % size
