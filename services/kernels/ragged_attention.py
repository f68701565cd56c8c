"""Attention of ragged query blocks over paged K/V in C: float32 on any CPU, bfloat16 on those with AVX512-BF16.

Against the reference it gathers nothing and pads nothing, reads each key once for all rows of a block, and keeps scores
in float32. `ragged_attention_ref` is the definition; this must agree with it to the rounding of the type.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.kernels import native

BLOCK = 16
"""Most query tokens of one block; longer chunks are cut, which also spreads them over threads."""


@dataclass(frozen=True)
class AttentionBlocks:
    """Index tensors of a step's query blocks, int64, the same for every layer.

    first [b], tokens [b], start [b]: a block's first row in the batch, its length, the position of its first row.
    end [b]: how many of its request's keys there are for it. owner [b]: row of `table` [requests, pages] that lists its
    request's pages. causal, window: which of those keys a row sees, as in attention_plan.plan_attention.
    """

    first: Tensor
    tokens: Tensor
    start: Tensor
    end: Tensor
    owner: Tensor
    table: Tensor
    causal: bool = True
    window: int = 0


class RaggedAttention:
    """The compiled kernel for one cache geometry; `find` returns None where it cannot run."""

    def __init__(self, function: Callable[..., int], num_pages: int, num_kv_heads: int, head_dim: int) -> None:
        self._function = function
        self._num_pages = num_pages
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim

    @classmethod
    def find(
        cls, dtype: torch.dtype, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> RaggedAttention | None:
        """The kernel for this geometry, compiled on first use."""
        library = None
        if dtype == torch.float32 and head_dim % 32 == 0:
            library = native.load("ragged_attention_f32", HEAD_DIM=head_dim, PAGE=page_size)
        elif torch.cpu._is_avx512_bf16_supported() and dtype == torch.bfloat16 and page_size % 16 == head_dim % 32 == 0:
            tiles = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()  # the system must allow it a process
            library = native.load("ragged_attention", HEAD_DIM=head_dim, PAGE=page_size, AMX=int(tiles))
        if library is None:
            return None
        function = library.ragged_attention
        pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        function.argtypes = [pointer, long, pointer, long, integer, integer, integer]
        function.argtypes += [pointer] * 6 + [long, integer, long, pointer, long, ctypes.c_float, integer]
        return cls(function, num_pages, num_kv_heads, head_dim)

    def __call__(self, q: Tensor, cache: Tensor, blocks: AttentionBlocks, rows: int = 0) -> Tensor:
        """q [n, Hq, d] (rows may be strided), cache as in the reference -> [max(n, rows), Hq * d], zeros beyond n."""
        n, heads, d = q.shape
        out = torch.empty((max(n, rows), heads * d), dtype=q.dtype)
        out[n:].zero_()
        failed = self._function(
            q.data_ptr(),
            q.stride(0),
            cache.data_ptr(),
            self._num_pages,
            self._num_kv_heads,
            heads // self._num_kv_heads,
            blocks.first.numel(),
            blocks.first.data_ptr(),
            blocks.tokens.data_ptr(),
            blocks.start.data_ptr(),
            blocks.end.data_ptr(),
            blocks.owner.data_ptr(),
            blocks.table.data_ptr(),
            blocks.table.shape[1],
            blocks.causal,
            blocks.window,
            out.data_ptr(),
            heads * d,
            d**-0.5 * math.log2(math.e),  # the kernel exponentiates with base 2
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for attention scores")
        return out
