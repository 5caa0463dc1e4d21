"""The observers for metrics systems, with the clients of these systems."""

from __future__ import annotations

from typing import Any

import pytest

import batched
from batched.metrics import opentelemetry, prometheus


def run(observer: Any) -> None:
    """Run a batch of two items, with one padded position of four, and a batch that fails."""

    @batched.dynamically(length=len, on_batch=observer, name="it")
    def fn(items: list[str]) -> list[int]:
        return [len(item) // (len(item) - 3) for item in items]

    with fn:
        assert fn(["a", "ab"]) == [-1, -2]
        with pytest.raises(ZeroDivisionError):
            fn("abc")


def test_prometheus_gets_every_batch() -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    run(prometheus(registry=registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"function": "it", **labels})

    assert value("batched_batches_total", flush_reason="eager", outcome="ok") == 1
    assert value("batched_batches_total", flush_reason="eager", outcome="failed") == 1
    assert (value("batched_items_total"), value("batched_failed_items_total")) == (3, 1)
    assert (value("batched_tokens_total"), value("batched_padding_tokens_total")) == (4 + 3, 1)
    assert (value("batched_batch_size_sum"), value("batched_batch_size_count")) == (3, 2)
    assert [value("batched_batch_size_bucket", le=bound) for bound in ("1.0", "2.0")] == [1, 2]
    for name in ("oldest_wait", "processing"):
        assert value(f"batched_{name}_seconds_count") == 2
        total = value(f"batched_{name}_seconds_sum")
        assert total is not None
        assert total >= 0


def test_one_registry_takes_observers_of_two_namespaces() -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    prometheus(registry=registry, namespace="one")
    prometheus(registry=registry, namespace="two")
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus(registry=registry, namespace="two")


def test_opentelemetry_gets_every_batch() -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    run(opentelemetry(provider=provider))
    data: Any = reader.get_metrics_data()
    metrics = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    counts = {
        name: sum(point.value for point in metrics[name].data.data_points)
        for name in metrics
        if hasattr(points(metrics[name])[0], "value")
    }
    assert counts == {
        "batched.batches": 2,
        "batched.items": 3,
        "batched.items.failed": 1,
        "batched.tokens": 7,
        "batched.tokens.padding": 1,
    }
    assert {
        (point.attributes["flush_reason"], point.attributes["outcome"])
        for point in points(metrics["batched.batches"])
    } == {
        ("eager", "ok"),
        ("eager", "failed"),
    }
    (sizes,) = points(metrics["batched.batch.size"])
    assert (sizes.sum, sizes.count, sizes.attributes["function"]) == (3, 2, "it")
    assert [
        points(metrics[f"batched.batch.{name}"])[0].count for name in ("oldest_wait", "duration")
    ] == [2, 2]
    provider.shutdown()


def points(metric: Any) -> list[Any]:
    return list(metric.data.data_points)
