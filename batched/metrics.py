"""Observers that report every batch to a metrics system.

For example `@batched.dynamically(on_batch=batched.metrics.prometheus())`.

One observer serves any number of batched functions, which the label `function` distinguishes. Both
systems count items, failed items, padded positions and padding, and batches by flush reason and
outcome. Both keep histograms of batch sizes, waits and processing times. Each system declares its
instruments itself: a table for both would be as long, because names, units and calls all differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ._installation import needs
from .stats import BatchRecord

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

__all__ = ["opentelemetry", "prometheus"]

SECONDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Upper bounds of the buckets of durations (s), from half a millisecond on.

The steps of 2 to 2.5 are the default of both systems.
"""
ITEMS: Final = tuple(2**power for power in range(11))
"""Upper bounds of the buckets of batch sizes."""


def prometheus(
    *, registry: CollectorRegistry | None = None, namespace: str = "batched"
) -> Callable[[BatchRecord], None]:
    """Return an observer that fills metrics of `prometheus-client`.

    The metrics are in `registry`, by default the global one. Make one observer for each registry.

    Raises:
        ImportError: `prometheus-client` is not installed.
        ValueError: the registry has metrics of that namespace already.
    """
    with needs("batched.metrics.prometheus", "prometheus"):
        from prometheus_client import REGISTRY, Counter, Histogram

    home = REGISTRY if registry is None else registry

    def counter(name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["function", *labels], namespace=namespace, registry=home)

    def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            name, text, ["function"], namespace=namespace, registry=home, buckets=buckets
        )

    batches = counter("batches", "Batches that have ended.", "flush_reason", "outcome")
    items = counter("items", "Items in batches that have ended.")
    failed = counter("failed_items", "Items that have an error instead of a result.")
    tokens = counter("tokens", "Positions that batch functions were given, padding included.")
    padding = counter(
        "padding_tokens", "Positions that batch functions were given that were padding."
    )
    sizes = histogram("batch_size", "Items in a batch.", ITEMS)
    waits = histogram(
        "oldest_wait_seconds",
        "From the arrival of the oldest call of a batch to forming it.",
        SECONDS,
    )
    durations = histogram(
        "processing_seconds", "From forming a batch to having its results.", SECONDS
    )

    def observe(record: BatchRecord) -> None:
        name = record.name
        batches.labels(name, record.flush_reason, record.outcome).inc()
        items.labels(name).inc(record.size)
        failed.labels(name).inc(record.failed)
        tokens.labels(name).inc(record.tokens)
        padding.labels(name).inc(record.tokens * record.padding_waste)
        sizes.labels(name).observe(record.size)
        waits.labels(name).observe(record.oldest_wait)
        durations.labels(name).observe(record.processing_time)

    return observe


def opentelemetry(*, provider: MeterProvider | None = None) -> Callable[[BatchRecord], None]:
    """Return an observer that fills instruments of OpenTelemetry's meter "batched".

    The meter is of `provider`, by default the global one.

    Raises:
        ImportError: `opentelemetry-api` is not installed.
    """
    with needs("batched.metrics.opentelemetry", "opentelemetry"):
        from opentelemetry.metrics import get_meter

    meter = get_meter("batched", meter_provider=provider)
    batches = meter.create_counter("batched.batches", "{batch}", "Batches that have ended.")
    items = meter.create_counter("batched.items", "{item}", "Items in batches that have ended.")
    failed = meter.create_counter(
        "batched.items.failed", "{item}", "Items that have an error instead of a result."
    )
    tokens = meter.create_counter(
        "batched.tokens", "{token}", "Positions that batch functions were given, padding included."
    )
    padding = meter.create_counter(
        "batched.tokens.padding",
        "{token}",
        "Positions that batch functions were given that were padding.",
    )
    sizes = meter.create_histogram(
        "batched.batch.size",
        "{item}",
        "Items in a batch.",
        explicit_bucket_boundaries_advisory=ITEMS,
    )
    waits = meter.create_histogram(
        "batched.batch.oldest_wait",
        "s",
        "From the arrival of the oldest call of a batch to forming it.",
        explicit_bucket_boundaries_advisory=SECONDS,
    )
    durations = meter.create_histogram(
        "batched.batch.duration",
        "s",
        "From forming a batch to having its results.",
        explicit_bucket_boundaries_advisory=SECONDS,
    )

    def observe(record: BatchRecord) -> None:
        function = {"function": record.name}
        batches.add(1, {**function, "flush_reason": record.flush_reason, "outcome": record.outcome})
        items.add(record.size, function)
        failed.add(record.failed, function)
        tokens.add(record.tokens, function)
        padding.add(record.tokens * record.padding_waste, function)
        sizes.record(record.size, function)
        waits.record(record.oldest_wait, function)
        durations.record(record.processing_time, function)

    return observe
