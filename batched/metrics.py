"""Metrics of all batched functions of a service, for Prometheus and OpenTelemetry.

Nothing is attached to a function: counts are read from every function that lives, instances of
methods and model processes included. The label `function` is the name of the function. Counts keep
growing when an instance or a process is gone.

Several processes, for example the workers of uvicorn, share their counts through the folder that
the environment variable `PROMETHEUS_MULTIPROC_DIR` names: a scrape of any of them gets the sums.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ._installation import needs
from ._operations.counts import FOLDER, of_all_processes, of_this_process, share_counts
from ._operations.families import METRICS, SECONDS, buckets, numbers

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from prometheus_client import CollectorRegistry, Metric

__all__ = ["asgi_app", "opentelemetry", "prometheus"]

_Scope = MutableMapping[str, Any]
_App = Callable[
    [_Scope, Callable[[], Awaitable[_Scope]], Callable[[_Scope], Awaitable[None]]], Awaitable[None]
]

_collectors: WeakKeyDictionary[Any, _Collector] = WeakKeyDictionary()
"""Collectors by registry."""


class _Collector:
    """Collector of prometheus-client."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all batched functions now."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        counts = of_all_processes()
        for metric in METRICS:
            name, labels = f"batched_{metric.name}", ["function"]
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.text, labels=labels)
                for function, found in counts.items():
                    bounds, total = buckets(metric, found)
                    texts = [(f"{bound:g}".replace("inf", "+Inf"), n) for bound, n in bounds]
                    histogram.add_metric([function], texts, total)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if metric.label:
                labels.append(metric.label)
            family = kind(name, metric.text, labels=labels)
            for function, found in counts.items():
                for value, number in numbers(metric, found):
                    family.add_metric([function, value][: len(labels)], number)
            yield family


def prometheus(*, registry: CollectorRegistry | None = None) -> None:
    """Register the metrics of all batched functions with `prometheus-client`.

    They are in `registry`, by default the global one. Further calls with the same registry change
    nothing. Call it in each process of the service, before the first scrape.

    Raises:
        ImportError: `prometheus-client` is not installed.
        FileNotFoundError: `PROMETHEUS_MULTIPROC_DIR` names a folder that does not exist.
        ValueError: the registry has metrics of these names already.
    """
    with needs("batched.metrics.prometheus", "prometheus"):
        from prometheus_client import REGISTRY

    home = REGISTRY if registry is None else registry
    share_counts()
    if home not in _collectors:
        collector = _Collector()
        home.register(collector)
        _collectors[home] = collector


def asgi_app() -> _App:
    """Return an ASGI app that answers a scrape with all metrics: `app.mount("/metrics", ...)`.

    The metrics are all of the global registry of `prometheus-client` and all of batched functions;
    if `PROMETHEUS_MULTIPROC_DIR` is set, summed over the processes that share the folder.

    Raises:
        ImportError: `prometheus-client` is not installed.
        FileNotFoundError: `PROMETHEUS_MULTIPROC_DIR` names a folder that does not exist.
    """
    with needs("batched.metrics.asgi_app", "prometheus"):
        from prometheus_client import REGISTRY, CollectorRegistry, make_asgi_app
        from prometheus_client.multiprocess import MultiProcessCollector

    prometheus()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        registry = REGISTRY
        if FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            prometheus(registry=registry)
        await make_asgi_app(registry)(scope, receive, send)

    return app


def opentelemetry(*, provider: MeterProvider | None = None) -> None:
    """Create the instruments of all batched functions in OpenTelemetry's meter `batched`.

    The meter is of `provider`, by default the global one. Counts and gauges are those of this
    process; OpenTelemetry tells processes apart by their resource. Histograms begin with the next
    batch. Call it once in each process.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    with needs("batched.metrics.opentelemetry", "opentelemetry"):
        from opentelemetry.metrics import Observation, get_meter

    from ._operations.probe import record_batches

    meter = get_meter("batched", meter_provider=provider)

    def observe(metric: Any, _: CallbackOptions) -> Iterable[Observation]:
        for function, found in of_this_process().items():
            for value, number in numbers(metric, found):
                labels = {metric.label: value} if metric.label else {}
                yield Observation(number, {"function": function, **labels})

    histograms: dict[str, Any] = {}
    for metric in METRICS:
        name = f"batched.{metric.name.removesuffix('_seconds')}"
        if metric.kind == "histogram":
            bounds = SECONDS if metric.unit == "s" else None
            histograms[metric.key] = meter.create_histogram(
                name, metric.unit, metric.text, explicit_bucket_boundaries_advisory=bounds
            )
        elif metric.kind == "counter":
            meter.create_observable_counter(
                name, [partial(observe, metric)], metric.unit, metric.text
            )
        else:
            meter.create_observable_gauge(
                name, [partial(observe, metric)], metric.unit, metric.text
            )
    record_batches(histograms)
