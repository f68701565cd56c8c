"""The best k of each row, against a full sort in float64, by the reference and by the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from services.kernels import candidates as compiled
from services.kernels import candidates_ref, native

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
BOTH = [pytest.param(candidates_ref.candidates, id="reference"), pytest.param(compiled.candidates, id="native")]


def check(find: Callable[[torch.Tensor, int], Found], logits: torch.Tensor, k: int) -> None:
    values, ids, total = find(logits, k)
    rows = logits.double().numpy()
    for i, row in enumerate(rows):
        wanted = np.lexsort((np.arange(len(row)), -row))[:k]
        assert ids[i].tolist() == wanted.tolist()
        assert values[i].double().tolist() == row[wanted].tolist()
        mass = row.max() + np.log(np.exp(row - row.max()).sum())
        assert abs(float(total[i]) - mass) < 2e-6 * max(1.0, abs(row.max()))
    assert (values.dtype, ids.dtype, total.dtype) == (torch.float32, torch.int64, torch.float32)


@pytest.mark.parametrize("find", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(3, 330), (1, 16), (2, 17), (5, 1024), (2, 4999)])
def test_best_of_random_rows(find: Callable[..., Found], dtype: torch.dtype, rows: int, size: int) -> None:
    """In bfloat16 many of the best are equal."""
    noise = torch.Generator().manual_seed(size)
    check(find, (torch.randn(rows, size, generator=noise) * 4).to(dtype), 16)


@pytest.mark.parametrize("find", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_smaller_id(find: Callable[..., Found], dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(1)
    few = torch.randint(-2, 3, (4, 2000), generator=noise).to(dtype)
    check(find, few, 16)
    check(find, torch.zeros(2, 400, dtype=dtype), 16)
    zeros = torch.zeros(1, 300, dtype=dtype)
    zeros[0, ::2] = -0.0  # equals 0.0
    check(find, zeros, 16)


@pytest.mark.parametrize("find", BOTH)
@pytest.mark.parametrize("where", [0, 5, 700, 985])
def test_best_wherever_they_lie(find: Callable[..., Found], where: int) -> None:
    """Rising and falling runs of the sixteen best, among equals, at both ends and across chunks."""
    for step in (1.0, -1.0):
        logits = torch.full((1, 1001), -3.0)
        logits[0, where : where + 16] = 100 + step * torch.arange(16.0)
        check(find, logits, 16)


@pytest.mark.parametrize("find", BOTH)
def test_other_counts_and_extremes(find: Callable[..., Found]) -> None:
    noise = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 500, generator=noise)
    for k in (1, 2, 40):
        check(find, logits, k)
    logits[:, 30:] = -torch.inf
    check(find, logits, 16)
    check(find, logits * 1000, 16)
    check(find, logits.flip(-1), 16)  # the first are all -inf


@pytest.mark.parametrize("find", BOTH)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rows_that_are_no_numbers_spoil_no_other(find: Callable[..., Found], sign: float) -> None:
    logits = torch.randn(3, 330, generator=torch.Generator().manual_seed(4))
    wanted = find(logits[[0, 2]], 16)
    logits[1] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    got = find(logits, 16)
    assert all(torch.equal(a[[0, 2]], b) for a, b in zip(got, wanted, strict=True))
    assert ((got[1] >= 0) & (got[1] < 330)).all()


@pytest.mark.parametrize("find", BOTH)
def test_rows_of_a_wider_tensor(find: Callable[..., Found]) -> None:
    noise = torch.Generator().manual_seed(3)
    check(find, torch.randn(4, 700, generator=noise)[:, :333], 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_is_used_where_it_can_be(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or native.load("candidates", BF16=1) is None:
        pytest.skip("the kernel needs AVX-512 and a compiler")
    monkeypatch.setattr(candidates_ref, "candidates", None)
    compiled.candidates(torch.randn(2, 64).to(dtype), 4)
