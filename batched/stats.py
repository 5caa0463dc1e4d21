"""Frozen snapshots: `Stats` of a batcher, and `BatchRecord` of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from ._core.linger import FlushReason

__all__ = ["BatchRecord", "Percentiles", "Stats"]


@dataclass(frozen=True)
class BatchRecord:
    """One batch that has ended: the argument of `on_batch`."""

    name: str
    """Name of the batch function."""
    size: int
    """Items in the batch."""
    calls: int
    """Calls with items in the batch."""
    tokens: int
    """Positions in the function's input, by the lengths of the items, padding included; 0 if items
    have no length.
    """
    padding_waste: float
    """Share of `tokens` that was padding."""
    flush_reason: FlushReason
    """Reason why the batch left: full, settled, timeout, eager or drain."""
    oldest_wait: float
    """Time from the arrival of its oldest call to its forming (s)."""
    processing_time: float
    """Time from its forming to its results (s)."""
    attempts: int
    """Calls of the function: more than one if the batch ran in parts."""
    outcome: Literal["ok", "partial", "failed"]
    """State of the items: "ok" if all have results, "partial" if some have, "failed" if none has.
    """
    failed: int
    """Items with an error instead of a result. If one item of a call fails, all its items count."""
    error: str | None
    """Name of the type of the first error; None if no item failed."""


@dataclass(frozen=True)
class Percentiles:
    """Three percentiles of a duration (s); 0.0 before the first duration.

    From 1 us on, each is within 1 % of the exact percentile.
    """

    p50: float
    """Median (s)."""
    p95: float
    """95th percentile (s)."""
    p99: float
    """99th percentile (s)."""

    def __str__(self) -> str:
        return f"p50 {_duration(self.p50)}, p95 {_duration(self.p95)}, p99 {_duration(self.p99)}"


@dataclass(frozen=True, repr=False)
class Stats:
    """Snapshot of one batcher.

    Counts start at its creation or the last `reset_stats()`. `queue_size`, `blocked` and
    `in_flight` are current values.
    """

    queue_size: int
    """Items that wait in the queue now."""
    blocked: int
    """Calls that wait for room in the queue now."""
    in_flight: int
    """Items without an answer in batches that are running now."""
    total_processed: int
    """Items in batches that have ended, with results or errors."""
    total_batches: int
    """Batches that have ended, with results or errors."""
    avg_batch_size: float
    """`total_processed / total_batches`; 0.0 before the first batch (items)."""
    avg_processing_time: float
    """Mean time from forming a batch to its results; 0.0 before the first batch (s)."""
    calls: int
    """Accepted calls, of one item or of many."""
    errors: int
    """Calls that ended with an exception of the batch function."""
    cancelled: int
    """Calls that ended unanswered: cancelled by the caller or at shutdown."""
    lost: int
    """Calls that ended unanswered because the event loop, thread or process that was to run them
    had ended.
    """
    timed_out: int
    """Calls that ended unanswered because none of their items ran within `queue_timeout_ms`."""
    rejected: int
    """Calls refused because the batcher was closed or its queue was full."""
    queue_wait: Percentiles
    """Time from the arrival of a call to the start of its first batch (s)."""
    processing_time: Percentiles
    """Time from forming a batch to its results (s)."""
    padding_waste: float
    """Share of padding in the input of the batch function, over batches of items with lengths; 0.0
    before the first of them.
    """
    memory_errors: int
    """Calls of the function that ran out of memory and were repeated in smaller parts."""
    batch_sizes: Mapping[int, int]
    """Number of batches by number of items, smallest first."""
    flush_reasons: Mapping[str, int]
    """Number of batches by the reason why they left: full, settled, timeout, eager, drain."""
    steps: int = 0
    """Steps of a function that works in steps (`batched.continuously`); 0 for other functions. A
    batch of this function is one row.
    """
    rows_per_step: float = 0.0
    """Mean number of live rows in a step."""
    places_filled: float = 0.0
    """`rows_per_step` as a share of `batch_size`."""
    row_endings: Mapping[str, int] = field(default_factory=dict)
    """Number of rows by their end: finished, failed, given up by the caller."""

    def __repr__(self) -> str:
        reasons = [f"{reason} {count:,}" for reason, count in self.flush_reasons.items()]
        blocked = f", {self.blocked:,} calls blocked" if self.blocked else ""
        lost = f", lost {self.lost:,}" if self.lost else ""
        timed_out = f", timed out {self.timed_out:,}" if self.timed_out else ""
        of_tensors = ""
        if self.padding_waste or self.memory_errors:
            of_tensors = f"; padding {self.padding_waste:.0%}, memory errors {self.memory_errors:,}"
        in_steps = ""
        if self.steps:
            in_steps = f"; {self.steps:,} steps of {self.rows_per_step:.1f} rows"
        return (
            f"Stats({self.total_processed:,} items in {self.total_batches:,} batches of "
            f"{self.avg_batch_size:.1f} on average, "
            f"{_duration(self.avg_processing_time)} each; {self.queue_size:,} waiting{blocked}, "
            f"{self.in_flight:,} in flight; "
            f"calls {self.calls:,}, errors {self.errors:,}, cancelled "
            f"{self.cancelled:,}{lost}{timed_out}, rejected {self.rejected:,}; "
            f"queue wait {self.queue_wait}; processing {self.processing_time}; left because "
            f"{', '.join(reasons) or 'none'}{of_tensors}{in_steps})"
        )

    def _repr_html_(self) -> str:
        """Return a table of all fields, for notebooks."""
        rows = [f"<tr><td>{each.name}<td>{getattr(self, each.name)}" for each in fields(self)]
        return f"<table>{''.join(rows)}</table>"


def _duration(seconds: float) -> str:
    unit, value = "s", seconds
    if seconds < 0.9995e-3:  # above this, three digits would round up to the next unit
        unit, value = "us", seconds * 1e6
    elif seconds < 0.9995:
        unit, value = "ms", seconds * 1e3
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
