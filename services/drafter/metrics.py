"""The drafter's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class DrafterMetrics:
    """One set per replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"kadence_drafter_{name}", text, registry=registry)

        self.sessions = Gauge("kadence_drafter_sessions", "Sessions open.", registry=registry)
        self.kv_tokens = Gauge("kadence_drafter_kv_tokens", "Tokens of context held.", registry=registry)
        self.steps = counter("steps", "Steps answered.")
        self.proposed_tokens = counter("proposed_tokens", "Tokens proposed.")
        self.feature_rows = counter("feature_rows", "Feature rows taken in.")
        self.resyncs = counter("resyncs", "Sessions asked to be sent again.")
        self.stale_messages = counter("stale_messages", "Messages of older attempts, ignored.")
        self.compute_seconds = Histogram(
            "kadence_drafter_compute_seconds", "Computing time of a step.", buckets=_SECONDS, registry=registry
        )
