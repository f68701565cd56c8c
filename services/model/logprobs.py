"""Log-probabilities of tokens under the model's own law: before temperature, penalties, masks and filters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms for one produced token: its own, and those of the likeliest tokens, likeliest first."""

    logprob: float
    top_ids: list[int]
    top: list[float]


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Raw logits [n, V] and the n tokens produced from them -> what to report, with `count` likeliest ids each.

    In float32. Ties go to the smaller id, also at the edge of the `count`.
    """
    table = torch.log_softmax(logits.float(), dim=-1)
    own = table[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    count = min(count, table.shape[-1])
    if count == 0:
        return [TokenLogprobs(logprob, [], []) for logprob in own]
    # topk breaks ties as it likes, so it only says how far down the list goes.
    near = table >= torch.topk(table, count, sorted=False).values.amin(dim=-1, keepdim=True)
    found = []
    for logprob, row, candidates in zip(own, table, near, strict=True):
        ids = candidates.nonzero().squeeze(1)
        values, order = torch.sort(row[ids], descending=True, stable=True)
        found.append(TokenLogprobs(logprob, ids[order[:count]].tolist(), values[:count].tolist()))
    return found
