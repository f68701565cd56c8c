"""A replica's metrics page: constant labels, free ports, no _created series."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import Counter

from kadence.errors import ConfigError
from services.runtime.metrics import Metrics


def test_page() -> None:
    metrics = Metrics("drafter", {"model_name": "m"})
    Counter("kadence_things", "Things.", ("kind",), registry=metrics.registry).labels("a").inc(2)
    address = metrics.start("127.0.0.1", 0)
    try:
        page = urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()
        assert 'kadence_things_total{kind="a",model_name="m",service="drafter"} 2.0' in page
        assert "process_resident_memory_bytes{" in page
        assert "_created" not in page
        with pytest.raises(ConfigError, match=f"metrics_port: {address} is in use"):
            Metrics("other").start("127.0.0.1", int(address.rsplit(":", 1)[1]))
    finally:
        metrics.close()
    metrics.close()


def test_off() -> None:
    assert Metrics("drafter").start("127.0.0.1", -1) == ""
