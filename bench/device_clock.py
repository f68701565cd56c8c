"""Times work on a device: from the host with everything waited for, by the device's own events, or as a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.stats import quantile

_WARM = 3


class Clock:
    """Measures on one device. A CPU has neither events nor graphs; the host's clock stands in for events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.init()  # statistics of memory are refused before

    def wait(self) -> None:
        """Until all work that was given to the device is done."""
        if self._cuda:
            torch.cuda.synchronize()

    def once(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """What `run` returns, and the milliseconds until all its work was done."""
        self.wait()
        start = time.perf_counter()
        result = run()
        self.wait()
        return result, (time.perf_counter() - start) * 1e3

    def often(self, run: Callable[[], Any], rounds: int) -> list[float]:
        """Milliseconds of each of `rounds` runs on the device, after some that do not count."""
        for _ in range(min(_WARM, rounds)):
            run()
        self.wait()
        if not self._cuda:
            return [self.once(run)[1] for _ in range(rounds)]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for begin, end in pairs:
            begin.record()
            run()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) for begin, end in pairs]

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """`run` as one launch: its kernels, captured, without the host's time between them. Needs CUDA."""
        side = torch.cuda.Stream()  # capture wants the work to have run before, on a stream that is not the default
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
        return graph.replay

    def forget_peak(self) -> None:
        """Begins a new peak of memory."""
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        """Most memory that tensors took since; None on a CPU."""
        return round(torch.cuda.max_memory_allocated() / 2**30, 3) if self._cuda else None


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, and what a tenth of the samples is below and above; milliseconds to a microsecond."""
    shares = {"median": 0.5, "low": 0.1, "high": 0.9}
    return {name: round(quantile(samples, share), 4) for name, share in shares.items()}
