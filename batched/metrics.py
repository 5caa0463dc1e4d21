"""Metrics of all batched functions of a service, for Prometheus and OpenTelemetry.

Nothing is attached to a function: every function is measured, instances of methods included. The
label `function` is the name of the function. Counts begin with the registration, and keep growing
when an instance or a process is gone.

Several processes, for example the workers of uvicorn, share a folder that the environment variable
`PROMETHEUS_MULTIPROC_DIR` names. It must exist, and be empty when the service starts. A scrape of
any of them then answers for all. Gauges are read at a scrape; other processes have written theirs
a moment earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ._installation import needs
from ._operations.families import BOUNDS, COUNTERS, GAUGES, HISTOGRAMS, measure, read_load

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

__all__ = ["asgi_app", "opentelemetry", "prometheus"]


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
        from ._operations.collector import register

    register(registry)


def asgi_app() -> Callable[..., Any]:
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

    registry = CollectorRegistry() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else REGISTRY
    prometheus(registry=registry)
    if registry is not REGISTRY:  # collects after ours has written the load
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return make_asgi_app(registry)


def opentelemetry(*, provider: MeterProvider | None = None) -> None:
    """Create the instruments of all batched functions in OpenTelemetry's meter `batched`.

    The meter is of `provider`, by default the global one. They measure this process;
    OpenTelemetry tells processes apart by their resource. Call it once in each process.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    with needs("batched.metrics.opentelemetry", "opentelemetry"):
        from opentelemetry.metrics import Observation, get_meter

    meter = get_meter("batched", meter_provider=provider)
    records: dict[str, Callable[..., object]] = {}
    label_of = {name: label[:1] for name, _, _, *label in COUNTERS}

    def find(name: str, *labels: str) -> Callable[[float], object]:
        names = ["function", *label_of.get(name, [])]
        return partial(records[name], attributes=dict(zip(names, labels, strict=True)))

    def observe(gauge: str, _: object) -> list[Observation]:
        load = read_load()[gauge].items()
        return [Observation(value, {"function": function}) for function, value in load]

    for name, unit, text, *_ in COUNTERS:
        records[name] = meter.create_counter(f"batched.{name}", unit, text).add
    for name, unit, text in GAUGES:
        read = partial(observe, name)
        meter.create_observable_gauge(f"batched.{name}", [read], unit, text)
    for name, unit, text in HISTOGRAMS:
        full = f"batched.{name.removesuffix('_seconds')}"
        make = partial(meter.create_histogram, full, unit, text)
        records[name] = make(explicit_bucket_boundaries_advisory=BOUNDS[unit]).record
    measure(find)
