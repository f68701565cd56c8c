"""One Prometheus registry and port per replica; each service defines its own metrics on it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.runtime.addresses import free, join

disable_created_metrics()  # the _created series double the page and nobody reads them


class Metrics:
    """Registry of one replica. Create metrics with `registry=metrics.registry`; `labels` go on every sample."""

    def __init__(self, service: str, labels: Mapping[str, str] | None = None) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.page = CollectorRegistry()
        """What is served: `registry` with the constant labels put on."""
        self.page.register(_Labelled(self.registry, {"service": service, **(labels or {})}))
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> str:
        """Serves /metrics and returns "host:port"; port 0 takes a free one, -1 serves nothing and returns "".

        Raises ConfigError if the port is taken.
        """
        if port < 0:
            return ""
        free("metrics_port", host, port)
        self._server, self._thread = start_http_server(port, host, self.page)
        return join(host, self._server.server_port)

    def close(self) -> None:
        """Stops serving, which may take half a second; safe to call twice."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)
        self._server = self._thread = None


class _Labelled(Collector):
    """Another registry's metrics with constant labels put on every sample."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        return []  # names are not known yet; the page holds nothing else, so nothing can collide

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s._replace(labels={**self._labels, **s.labels}) for s in metric.samples]
            yield metric
