"""Prometheus metrics of the HTTP API."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import Scope

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROUTES = ("/health", "/v1/models", "/v1/completions", "/v1/chat/completions")


class HttpMetrics:
    """Counts responses. Paths of nobody's are counted as one, so that strangers cannot make new series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "kadence_http_requests",
            "HTTP requests by route and status (499: the client left).",
            ("route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "kadence_http_request_duration_seconds",
            "From the request's head to the end of the response.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """A response was sent, or its client left."""
        route = _route(scope["path"])
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)


def _route(path: str) -> str:
    if path in _ROUTES:
        return path
    return "/v1/models/{name}" if path.startswith("/v1/models/") else "other"
