"""Metrics of batched functions: names, labels, texts, and values made of counts.

Prometheus and OpenTelemetry have the same metrics. Names of Prometheus begin with `batched_`, end
with the unit, and counters end with `_total`; names of OpenTelemetry begin with `batched.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from .._runtime.recorder import OCTAVES, SHORTEST, Counts


@dataclass(frozen=True)
class Metric:
    """A metric that every batched function has."""

    key: str
    """Name among the counts of a function."""
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    """Unit of OpenTelemetry."""
    text: str
    label: str = ""
    """Label beside `function`; empty: none."""
    values: tuple[str, ...] = ("",)
    """Values of this label that are reported even if their count is 0."""


METRICS: Final = (
    Metric("calls", "calls", "counter", "{call}", "Calls accepted, of one item or of many."),
    Metric(
        *("failed", "failed_calls", "counter", "{call}", "Calls that ended without a result."),
        label="reason",
        values=("error", "cancelled", "lost", "timed_out", "rejected"),
    ),
    Metric("items", "items", "counter", "{item}", "Items in batches that have ended."),
    Metric(
        *("batches", "batches", "counter", "{batch}", "Batches that have ended."),
        label="flush_reason",
        values=("full", "settled", "timeout", "eager", "drain"),
    ),
    Metric(
        *("tokens", "tokens", "counter", "{token}"),
        "Positions that functions were given, by the lengths of items, padding included.",
    ),
    Metric("padding", "padding_tokens", "counter", "{token}", "Positions that were padding."),
    Metric(
        *("memory_errors", "memory_errors", "counter", "{call}"),
        "Calls of functions that ran out of memory and were repeated in parts.",
    ),
    Metric("steps", "steps", "counter", "{step}", "Steps of functions that work in steps."),
    Metric("live_rows", "live_rows", "counter", "{row}", "Live rows, summed over these steps."),
    Metric(
        *("rows", "rows", "counter", "{row}", "Rows that have ended."),
        label="ending",
        values=("finished", "failed", "given up"),
    ),
    Metric("waiting", "waiting_items", "gauge", "{item}", "Items that wait in the queue."),
    Metric("blocked", "blocked_calls", "gauge", "{call}", "Calls that wait for room in the queue."),
    Metric(
        *("limit", "queue_limit_items", "gauge", "{item}"),
        "Most items that may wait in the queue; 0: no limit.",
    ),
    Metric("running", "running_items", "gauge", "{item}", "Items that run and have no answer."),
    Metric("size", "batch_size", "histogram", "{item}", "Items in a batch."),
    Metric(
        *("wait", "queue_wait_seconds", "histogram", "s"),
        "From the arrival of a call to the start of its first batch.",
    ),
    Metric(
        *("processing", "processing_seconds", "histogram", "s"),
        "From forming a batch to its results.",
    ),
)

ITEMS: Final = tuple(2**power for power in range(13))
"""Upper bounds of the buckets of batch sizes."""
SHORT_OCTAVE: Final = 8
LONG_OCTAVE: Final = 24
"""Octaves of the shortest and of the longest bucket of durations: 0.5 ms and 34 s."""
SECONDS: Final = tuple(
    SHORTEST * 2 ** (octave + 1) for octave in range(SHORT_OCTAVE, LONG_OCTAVE + 1)
)
"""Upper bounds of the buckets of durations (s): each is twice the one before it, as in the counts,
so that no duration is in a wrong bucket.
"""


def numbers(metric: Metric, counts: Counts) -> Iterator[tuple[str, float]]:
    """Yield each value of the label of a counter or gauge, and its number."""
    for value in metric.values:
        yield value, counts[metric.key, value]


def buckets(metric: Metric, counts: Counts) -> tuple[list[tuple[float, int]], float]:
    """Return the cumulative buckets of a histogram, and the sum of all its values."""
    if metric.key == "size":
        sizes = {int(label): int(count) for (key, label), count in counts.items() if key == "size"}
        found = [
            (float(bound), sum(count for size, count in sizes.items() if size <= bound))
            for bound in ITEMS
        ]
        return [*found, (float("inf"), sum(sizes.values()))], counts["items", ""]
    octaves = [int(counts[metric.key, str(octave)]) for octave in range(OCTAVES)]
    found = [
        (bound, sum(octaves[: octave + 1]))
        for octave, bound in enumerate(SECONDS, start=SHORT_OCTAVE)
    ]
    return [*found, (float("inf"), sum(octaves))], counts[f"{metric.key}_sum", ""]
