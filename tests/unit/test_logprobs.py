"""Log-probabilities: log_softmax of the raw logits, and the best ids in order."""

from __future__ import annotations

import pytest
import torch

from services.model.logprobs import token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, 20, 50])
def test_they_are_the_log_softmax(count: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(7, 50, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    tokens = [0, 49, 3, 3, 20, 7, 8]
    wide = logits.double()
    table = wide - wide.exp().sum(dim=-1, keepdim=True).log()
    for row, token, got in zip(table, tokens, token_logprobs(logits, tokens, count), strict=True):
        assert got.logprob == pytest.approx(float(row[token]), abs=1e-5)
        best = sorted(range(50), key=lambda i: (-float(row[i]), i))[:count]
        assert got.top == pytest.approx([float(row[i]) for i in best], abs=1e-5)
        assert got.top_ids == best


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [5.0] * 6])
    one, other = token_logprobs(logits, [3, 0], 4)
    assert (one.top_ids, other.top_ids) == ([1, 3, 2, 4], [0, 1, 2, 3])
    assert other.logprob == pytest.approx(-1.791759) and one.logprob == one.top[0]
    assert token_logprobs(logits, [3, 0], 20)[0].top_ids == [1, 3, 2, 4, 5, 0]


def test_extreme_logits() -> None:
    (got,) = token_logprobs(torch.tensor([[3e38, -3e38, 0.0]]), [2], 2)
    assert (got.logprob, got.top_ids, got.top) == (pytest.approx(-3e38), [0, 2], [0.0, pytest.approx(-3e38)])
