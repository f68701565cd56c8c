"""What is measured of a device: its ceilings, attention by itself, and the steps of the inner loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from bench.cycle import PAGE, Cycle, Models
from bench.device_clock import Clock, spread
from services.kernels.ragged_attention_ref import AttentionGroup, ragged_attention

_WARM_STEPS = 2
_SAMPLED_ROUNDS = 3
_TEMPERATURE = 0.8


def most_steps(rounds: int) -> int:
    """Steps of a text that is measured `rounds` times."""
    return _WARM_STEPS + 2 * rounds + 1


def ceilings(clock: Clock, mebibytes: int, size: int, rounds: int) -> dict[str, float]:
    """GB/s of copies, bytes read and written both counted on the device, and TFLOP/s of a bfloat16 matrix product.

    `mebibytes` of each copied buffer, `size` of the square matrices. Host copies are from and to pinned memory.
    """
    device = clock.device
    count = mebibytes * 2**20
    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))

    def rate(run: Callable[[], Any], work: float) -> float:
        """`work` in billions, per second of the median run."""
        return round(work / (spread(clock.often(run, rounds))["median"] / 1e3), 1)

    return {
        "copy_gb_per_s": rate(lambda: target.copy_(source), 2 * count / 1e9),
        "to_host_gb_per_s": rate(lambda: host.copy_(source, non_blocking=True), count / 1e9),
        "from_host_gb_per_s": rate(lambda: target.copy_(host, non_blocking=True), count / 1e9),
        "matmul_tflop_per_s": rate(lambda: torch.mm(a, b), 2 * size**3 / 1e12),
    }


def step(clock: Clock, models: Models, sequences: int, k: int, rounds: int) -> dict[str, Any]:
    """Times of one setting's steps: each stage waited for, then whole steps; milliseconds by the host's clock."""
    clock.forget_peak()
    cycle = Cycle(models, sequences, k)
    try:
        for _ in range(_WARM_STEPS):
            cycle.step()
        stages: dict[str, list[float]] = {"draft": [], "verify": [], "accept": []}
        committed = 0
        for _ in range(rounds):
            drafts, took = clock.once(cycle.draft)
            stages["draft"].append(took)
            stages["verify"].append(clock.once(lambda drafts=drafts: cycle.verify(drafts))[1])  # type: ignore[misc]
            count, took = clock.once(lambda drafts=drafts: cycle.accept(drafts))  # type: ignore[misc]
            stages["accept"].append(took)
            committed += count
        whole = [clock.once(cycle.step)[1] for _ in range(rounds)]
        drafts = cycle.draft()
        cycle.verify(drafts)
        sampled = [
            clock.once(lambda: cycle.judge(drafts, _TEMPERATURE))[1] for _ in range(min(_SAMPLED_ROUNDS, rounds))
        ]
        return {
            **_setting(models, sequences, k),
            "context": cycle.texts[0].position,
            **{f"{name}_ms": spread(times) for name, times in stages.items()},
            "accept_sampled_ms": spread(sampled),
            "whole_ms": spread(whole),
            "committed_per_step": committed / rounds / sequences,
            "peak_gib": clock.peak_gib(),
        }
    finally:
        cycle.close()


def passes(clock: Clock, models: Models, sequences: int, k: int, rounds: int) -> dict[str, Any]:
    """Times of the two passes as graphs: what they would cost if the host were never waited for. Needs CUDA."""
    clock.forget_peak()
    cycle = Cycle(models, sequences, k)
    try:
        cycle.step()
        planned = cycle.plan(cycle.draft())
        found: dict[str, Callable[[], Any]] = {"verify": torch.inference_mode()(lambda: cycle.forward(planned))}
        if k:
            found["block"] = cycle.block()
        times = {f"{name}_graph_ms": spread(clock.often(clock.graph(run), rounds)) for name, run in found.items()}
        return {**_setting(models, sequences, k), **times, "peak_gib": clock.peak_gib()}
    finally:
        cycle.close()


def _setting(models: Models, sequences: int, k: int) -> dict[str, Any]:
    """What was run, and the bytes that its passes must read at least."""
    target, context = models.shape.target, models.shape.context
    kv = sequences * context * target.kv_bytes_per_token(models.shape.dtype.itemsize)
    return {
        "sequences": sequences,
        "k": k,
        "rows": sequences * (1 + k),
        "verify_bytes": models.target_bytes - models.table_bytes + kv,
        "draft_bytes": models.drafter_bytes + models.table_bytes if k else 0,
    }


def attention(clock: Clock, models: Models, sequences: int, k: int, rounds: int) -> dict[str, Any]:
    """One layer's attention in several ways, each over the same paged K/V; milliseconds on the device.

    paged: what the target runs. gather: its copy of the pages alone. masked, causal: torch's own over pages already
    copied, with the mask as a tensor, and as the shape it has. A way that fails is told as its error.
    """
    cycle = Cycle(models, sequences, k)
    try:
        group = cycle.plan(cycle.draft()).groups[0]
    finally:
        cycle.close()
    arch, cache = models.shape.target, models.caches[0]
    kv_heads, d = arch.num_kv_heads, arch.head_dim
    q = torch.randn(sequences * (1 + k), arch.num_heads, d, dtype=cache.dtype, device=cache.device)
    dense, seen = _gathered(cache, group, kv_heads), cycle.texts[0].position + 1 + k
    ways: dict[str, Callable[[], Any]] = {
        "paged": lambda: ragged_attention(q, cache, [group], kv_heads, d),
        "gather": lambda: cache.index_select(0, group.pages),
        "masked": lambda: _own(q, dense[0], dense[1], group.mask[:, :, :, 0].transpose(0, 1).to(cache.dtype)),
        "causal": lambda: _own(q, dense[0][:, :, :seen], dense[1][:, :, :seen], None),
    }
    result: dict[str, Any] = {"sequences": sequences, "k": k, "kv_bytes": 2 * dense[0].nbytes, "page": PAGE}
    for name, run in ways.items():
        try:
            result[f"{name}_ms"] = spread(clock.often(torch.inference_mode()(run), rounds))
        except (RuntimeError, TypeError) as error:
            result[f"{name}_error"] = str(error)[:300]
    return result


def _gathered(cache: Tensor, group: AttentionGroup, kv_heads: int) -> tuple[Tensor, Tensor]:
    """K and V of a group as [R, Hkv, L, d] each."""
    kv = cache.index_select(0, group.pages).view(2, kv_heads, group.requests, group.keys, -1)
    return kv[0].transpose(0, 1).contiguous(), kv[1].transpose(0, 1).contiguous()


def _own(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention: q [R * Q, Hq, d] over k and v [R, Hkv, L, d]; without a mask, the last row sees all keys."""
    rows = q.view(k.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    if mask is None:
        mask = causal_lower_right(rows.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)
