"""Losses against dense cross entropy in plain torch, and the selector's by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from services.kernels import gradients
from training.loss import Labels, head_loss, selector_loss

ROWS, SIZE, HIDDEN, KEPT = 12, 96, 32, 5


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Float32 that bfloat16 holds exactly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def labels() -> Labels:
    """Tokens inside and outside the draft vocabulary, also among the target's likeliest; rows that do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(SIZE, generator=generator)[:KEPT] for _ in range(ROWS)])
    ids[2, 1] = ids[5] = -1
    token = torch.randint(SIZE, (ROWS,), generator=generator)
    token[0], token[3], token[5] = ids[0, 0], -1, -1
    p = torch.rand(ROWS, KEPT, generator=generator) / KEPT
    weight = torch.rand(ROWS, generator=generator)
    weight[7] = 0
    return Labels(token, torch.full((ROWS,), 3), ids, p, weight)


def target(of: Labels, soft: float) -> Tensor:
    """[n, v]: what each row should be like, times its weight."""
    dense = torch.zeros(ROWS, SIZE)
    for row in range(ROWS):
        if of.token[row] >= 0:
            dense[row, of.token[row]] += 1 - soft
        for token, p in zip(of.ids[row].tolist(), of.p[row].tolist(), strict=True):
            if token >= 0:
                dense[row, token] += soft * p
    return dense * of.weight[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft", [0.0, 0.3, 1.0])
def test_head_loss(soft: float, dtype: torch.dtype) -> None:
    """Value and gradient, through the loss and through the scores of the best k, whatever the loss is multiplied by."""
    hidden, head, of = numbers(ROWS, HIDDEN), numbers(SIZE, HIDDEN, seed=2) * 0.25, labels()
    by = numbers(ROWS, 16, seed=3) * 0.1
    own = hidden.clone().to(dtype).requires_grad_()
    loss, scores = head_loss(own, head.to(dtype), of, soft, 16)
    (2 * loss + (by * scores.values).sum()).backward()
    leaf = hidden.clone().requires_grad_()
    logits = leaf @ head.T
    plain = -(target(of, soft) * torch.log_softmax(logits, -1)).sum()
    (2 * plain + (by * logits.gather(1, scores.ids)).sum()).backward()

    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, plain.detach(), rtol=bound, atol=bound)
    torch.testing.assert_close(scores.total, logits.detach().logsumexp(-1), rtol=bound, atol=bound)
    best = logits.detach().topk(16)
    torch.testing.assert_close(scores.values, best.values, rtol=bound, atol=bound)
    if dtype == torch.float32:  # else neighbours may be as good as each other
        assert torch.equal(scores.ids, best.indices)
    assert own.grad is not None and leaf.grad is not None and own.grad.dtype == dtype
    assert float((own.grad.float() - leaf.grad).norm() / leaf.grad.norm()) < bound


def test_rows_that_count_nothing_learn_nothing() -> None:
    hidden, of = numbers(ROWS, HIDDEN).requires_grad_(), labels()
    loss, _ = head_loss(hidden, numbers(SIZE, HIDDEN, seed=2), of, 0.5, 4)
    loss.backward()
    assert hidden.grad is not None
    # 5: nothing of it is in the vocabulary. 7: it weighs nothing.
    assert [row for row in range(ROWS) if not hidden.grad[row].any()] == [5, 7]


def test_head_loss_of_wide_rows_is_the_same_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient with the C pass and without it, in bfloat16."""
    found = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(gradients, "_offered", lambda *_: False)
        hidden = numbers(ROWS, HIDDEN).bfloat16().requires_grad_()
        loss, scores = head_loss(hidden, numbers(SIZE, HIDDEN, seed=2).bfloat16(), labels(), 0.5, 8)
        (loss + scores.values.sum()).backward()
        assert hidden.grad is not None
        found.append(hidden.grad.float())
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_selector_loss() -> None:
    """Cross entropy among the candidates; a token that is none of them, or is not in the vocabulary, counts nothing."""
    final = numbers(4, 3).requires_grad_()
    ids = torch.tensor([[7, 2, 9], [7, 2, 9], [7, 2, 9], [0, 1, 2]])
    loss, place = selector_loss(final, ids, torch.tensor([9, 7, 3, -1]))
    assert place.tolist() == [2, 0, -1, -1]
    law = torch.softmax(final.detach(), dim=-1)
    torch.testing.assert_close(loss.detach(), torch.stack([-law[0, 2].log(), -law[1, 0].log(), *torch.zeros(2)]))
    loss.sum().backward()
    wanted = law - F.one_hot(torch.tensor([2, 0, 0, 0]), 3)
    wanted[2:] = 0
    torch.testing.assert_close(final.grad, wanted)
