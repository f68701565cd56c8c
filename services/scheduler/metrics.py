"""The scheduler's Prometheus metrics, named as vLLM names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kadence.errors import APIError
from services.scheduler.policy import Epoch
from services.scheduler.session import Session

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class SchedulerMetrics:
    """Counts requests from refusal or acceptance to their end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._registry = registry
        self._success = Counter(
            "kadence_request_success", "Requests that were answered.", ("finished_reason",), registry=registry
        )
        self._failure = Counter("kadence_request_failure", "Requests refused or failed.", ("code",), registry=registry)
        self._prompt = Counter("kadence_prompt_tokens", "Prompt tokens of accepted requests.", registry=registry)
        self.generated = Counter("kadence_generation_tokens", "Tokens produced.", registry=registry)
        self._first = histogram("kadence_time_to_first_token_seconds", "From acceptance to the first token.")
        self._inter = histogram(
            "kadence_inter_token_latency_seconds", "Time per token of a step, one sample a step.", _TOKEN_SECONDS
        )
        self._end_to_end = histogram("kadence_e2e_request_latency_seconds", "From acceptance to the end.")
        self._queue = histogram("kadence_request_queue_time_seconds", "From acceptance to a verifier.")
        self._epoch = Gauge("kadence_policy_epoch", "Counter of the policy in force.", registry=registry)

    def watch(
        self, running: Callable[[], int], waiting: Callable[[], int], replicas: Callable[[], dict[tuple[str, str], int]]
    ) -> None:
        """Reads these when a scrape asks; `replicas()` counts by (kind, state)."""
        self._registry.register(_Watched(running, waiting, replicas))

    def set_epoch(self, epoch: Epoch) -> None:
        """A policy is in force."""
        self._epoch.set(epoch.counter)

    def refused(self, error: APIError) -> None:
        """A request that was not accepted."""
        self._failure.labels(error.code).inc()

    def accepted(self, session: Session) -> None:
        """A request that was."""
        self._prompt.inc(len(session.request.prompt_token_ids))

    def submitted(self, session: Session, now: float) -> None:
        """It went to a verifier."""
        self._queue.observe(now - session.queued_at)

    def first_token(self, seconds: float) -> None:
        """A request's first token came after `seconds`."""
        self._first.observe(seconds)

    def step(self, seconds_per_token: float) -> None:
        """A later step gave a request tokens."""
        self._inter.observe(seconds_per_token)

    def ended(self, session: Session, now: float) -> None:
        """It came to its end."""
        if isinstance(session.outcome, APIError):
            self._failure.labels(session.outcome.code).inc()
        elif session.outcome is not None:
            self._success.labels(session.outcome.reason.name.lower()).inc()
            self._end_to_end.observe(now - session.accepted_at)


class _Watched(Collector):
    def __init__(
        self, running: Callable[[], int], waiting: Callable[[], int], replicas: Callable[[], dict[tuple[str, str], int]]
    ) -> None:
        self._running, self._waiting, self._replicas = running, waiting, replicas

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("kadence_num_requests_running", "Requests at a verifier.", self._running())
        yield GaugeMetricFamily("kadence_num_requests_waiting", "Requests in the queue.", self._waiting())
        replicas = GaugeMetricFamily("kadence_replicas", "Replicas attached.", labels=("kind", "state"))
        for key, count in self._replicas().items():
            replicas.add_metric(key, count)
        yield replicas
