"""Collector of prometheus-client, for one process or for several that share a folder."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from .._runtime import observer
from .._runtime.notices import LogOnce
from .._runtime.timer_thread import timer
from .families import BOUNDS, COUNTERS, GAUGES, HISTOGRAMS, measure, read_load

FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which prometheus-client keeps the values of processes."""
PAUSE: Final = 0.1
"""Shortest time between two writes of gauges to this folder when calls are accepted (s)."""


class Collector:
    """Collector with an instrument of prometheus-client for each metric."""

    def __init__(self) -> None:
        self._all: dict[str, Any] = {}
        for name, _, text, *label in COUNTERS:
            labels = ["function", *label[:1]]
            self._all[name] = Counter(f"batched_{name}", text, labels, registry=None)
        for name, _, text in GAUGES:
            self._all[name] = Gauge(
                f"batched_{name}", text, ["function"], registry=None, multiprocess_mode="livesum"
            )
        for name, unit, text in HISTOGRAMS:
            self._all[name] = Histogram(
                f"batched_{name}", text, ["function"], registry=None, buckets=BOUNDS[unit]
            )
        self._functions: set[str] = set()  # functions with a load that was written
        if FOLDER in os.environ:
            os.stat(os.environ[FOLDER])
            observer.share = self._share
        measure(self._find)

    def _find(self, name: str, *labels: str) -> Any:
        child = self._all[name].labels(*labels)
        return child.observe if hasattr(child, "observe") else child.inc

    def _write(self) -> None:
        """Write the load of this process."""
        with observer.reporting:
            for name, values in read_load().items():
                self._functions |= values.keys()
                for function in self._functions:
                    self._all[name].labels(function).set(values[function])

    @LogOnce("the load of this process could not be written")
    def _share(self, last: bool = False) -> None:
        """Write the load now, and again when a worker will have taken the calls.

        Do nothing if it was written a moment ago.
        """
        now = time.perf_counter()
        if last or now >= observer.due:
            observer.due = now + PAUSE
            self._write()
            if not last:
                timer.start()
                timer.call_at(now + 2 * PAUSE, self._write)

    def collect(self) -> list[Any]:
        """Read the load, and return the metrics of this process.

        If processes share a folder, only prepare it: prometheus-client returns the metrics.
        """
        self._write()
        if FOLDER not in os.environ:
            return [family for each in self._all.values() for family in each.collect()]
        for path in Path(os.environ[FOLDER]).glob("gauge_livesum_*.db"):
            try:
                os.kill(int(path.stem.split("_")[2]), 0)
            except ProcessLookupError:
                with suppress(FileNotFoundError):  # another process has counted its calls
                    self._bury(path.rename(path.with_suffix(f".{os.getpid()}")))
            except PermissionError:
                pass
        return []

    def _bury(self, path: Path) -> None:
        """Count the open calls of a dead process as lost, and remove its gauges at `path`."""
        for gauge in MultiProcessCollector.merge([path]):  # type: ignore[no-untyped-call]
            for sample in gauge.samples:
                if sample.name == "batched_open_calls":
                    lost = self._find("failed_calls", sample.labels["function"], "lost")
                    lost(sample.value)
        path.unlink()


_the_collector = cache(Collector)
_registries: WeakSet[Any] = WeakSet()
"""Registries that have the collector."""


def register(registry: CollectorRegistry | None) -> None:
    """Register the metrics of this process with a registry, by default the global one."""
    home = registry or REGISTRY
    if home not in _registries:
        home.register(_the_collector())
        _registries.add(home)
