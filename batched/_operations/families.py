"""Metrics of batched functions: names, texts, and values made of counts.

Prometheus and OpenTelemetry have the same metrics. Names of Prometheus begin with `batched_`, end
with the unit, and counters end with `_total`; names of OpenTelemetry begin with `batched.`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from .._runtime import observer
from .._runtime.call_queue import alive
from .._runtime.recorder import FAILURES, REASONS, ROW_ENDINGS

COUNTERS: Final[Any] = (
    ("calls", "{call}", "Calls accepted, of one item or of many."),
    ("failed_calls", "{call}", "Calls without a result.", "reason", "error", *FAILURES),
    ("items", "{item}", "Items in batches that have ended."),
    ("batches", "{batch}", "Batches that have ended.", "flush_reason", *REASONS),
    ("tokens", "{token}", "Positions in inputs by the lengths of items, padding included."),
    ("padding_tokens", "{token}", "Positions that were padding."),
    ("memory_errors", "{call}", "Calls of functions that ran out of memory."),
    ("steps", "{step}", "Steps of functions that work in steps."),
    ("live_rows", "{row}", "Live rows, summed over these steps."),
    ("rows", "{row}", "Rows that have ended.", "ending", *ROW_ENDINGS),
)
"""Name, unit and text of each counter; its second label, and the values of the label."""

GAUGES: Final = (
    ("waiting_items", "{item}", "Items that wait in the queue."),
    ("blocked_calls", "{call}", "Calls that wait for room in the queue."),
    ("running_items", "{item}", "Items that run and have no answer."),
    ("queue_limit_items", "{item}", "Most items that may wait in the queue; 0: no limit."),
    ("open_calls", "{call}", "Calls accepted that have no answer yet."),
)

HISTOGRAMS: Final = (
    ("batch_size", "{item}", "Items in a batch."),
    ("queue_wait_seconds", "s", "From the arrival of a call to the start of its first batch."),
    ("processing_seconds", "s", "From forming a batch to its results."),
)

BOUNDS: Final = {
    "{item}": [2**power for power in range(13)],
    "s": [2**power / 2000 for power in range(17)],
}
"""Upper bounds of the buckets of histograms, by their unit: 1 to 4,096 items, 0.5 ms to 33 s."""

_COUNTS: Final = {
    value: (name, label[1:] and (value,))
    for name, _, _, *label in COUNTERS
    for value in label[1:] or [name]
}
"""Counter and labels of each count."""


def measure(find: Callable[..., Callable[[float], object]]) -> None:
    """Pass all that is counted from now on to instruments.

    `find` returns the method that takes values, for a metric's name, a function and a label. It is
    called once for each of them.
    """
    found = cache(find)

    def meter(function: str, key: Any, number: float) -> None:
        if isinstance(key, tuple):
            name, value = key
            add = found(name, function)
            for _ in range(int(number)):
                add(value)
        elif key in _COUNTS:
            name, label = _COUNTS[key]
            found(name, function, *label)(number)

    read_load()  # counts until now are for the meters before this one
    observer.meters.append(meter)


def read_load() -> dict[str, Counter[str]]:
    """Return the present values of each gauge by function. Report all counts."""
    found: dict[str, Counter[str]] = {name: Counter() for name, *_ in GAUGES}
    for runtime in alive():
        runtime.recorder.flush()
        observer.note(runtime.name, dict.fromkeys(_COUNTS, 0))
        load = *runtime.load(), runtime.policy.max_queue_size or 0, runtime.open_calls()
        for of_gauge, number in zip(found.values(), load, strict=True):
            of_gauge[runtime.name] += number
    observer.report()
    return found
