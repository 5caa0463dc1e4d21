"""Statistics of a batcher: `Stats`, a frozen snapshot, and the recorder that counts."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, Literal

from ._core.linger import FlushReason
from ._core.scheduler import Batch

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

    Between 1 us and a day each is within 3 % of the exact percentile.
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
    """Calls that ended unanswered: cancelled by the caller or at shutdown, or lost with their event
    loop.
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

    def __repr__(self) -> str:
        reasons = (
            ", ".join(f"{reason} {count:,}" for reason, count in self.flush_reasons.items())
            or "none"
        )
        blocked = f", {self.blocked:,} calls blocked" if self.blocked else ""
        timed_out = f", timed out {self.timed_out:,}" if self.timed_out else ""
        of_tensors = ""
        if self.padding_waste or self.memory_errors:
            of_tensors = f"; padding {self.padding_waste:.0%}, memory errors {self.memory_errors:,}"
        return (
            f"Stats({self.total_processed:,} items in {self.total_batches:,} batches of "
            f"{self.avg_batch_size:.1f} on average, "
            f"{_duration(self.avg_processing_time)} each; {self.queue_size:,} waiting{blocked}, "
            f"{self.in_flight:,} in flight; "
            f"calls {self.calls:,}, errors {self.errors:,}, cancelled "
            f"{self.cancelled:,}{timed_out}, rejected {self.rejected:,}; "
            f"queue wait {self.queue_wait}; processing {self.processing_time}; left because "
            f"{reasons}{of_tensors})"
        )


def _duration(seconds: float) -> str:
    unit, value = "s", seconds
    if seconds < 0.9995e-3:  # above this, three digits would round up to the next unit
        unit, value = "us", seconds * 1e6
    elif seconds < 0.9995:
        unit, value = "ms", seconds * 1e3
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


class _Histogram:
    """Counts of durations in buckets 6 % wide, from a microsecond to a day.

    Memory is fixed. Many durations of similar length take only one or two look-ups.
    """

    PER_OCTAVE: Final = 12  # 2 ** (1 / 12) = 1.06
    SHORTEST: Final = 1e-6
    OCTAVES: Final = 37  # 2 ** 37 microseconds are 38 hours

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(ENDS) + 1)

    def add(self, durations: list[float]) -> None:
        """Count `durations` (s), and sort the list in place."""
        durations.sort()
        low = 0
        while low < len(durations):
            bucket = bisect_left(ENDS, durations[low])
            high = (
                bisect_right(durations, ENDS[bucket], low) if bucket < len(ENDS) else len(durations)
            )
            self.counts[bucket] += high - low
            low = high

    def percentiles(self) -> Percentiles:
        return Percentiles(self._quantile(0.50), self._quantile(0.95), self._quantile(0.99))

    def _quantile(self, share: float) -> float:
        """Return the middle of the bucket of a quantile (s).

        The quantile is the shortest duration that is not exceeded by `share` of all.
        """
        wanted = math.ceil(share * sum(self.counts))
        if not wanted:
            return 0.0
        position = 0
        while (wanted := wanted - self.counts[position]) > 0:
            position += 1
        return float(self.SHORTEST * 2 ** ((position + 0.5) / self.PER_OCTAVE))


ENDS: Final = [
    _Histogram.SHORTEST * 2 ** (end / _Histogram.PER_OCTAVE)
    for end in range(1, _Histogram.PER_OCTAVE * _Histogram.OCTAVES)
]
"""Ends of all buckets of a histogram except the last (s)."""


_Ended = tuple[tuple[int, FlushReason], float, Sequence[float], int, int, int, int]
"""Ended batch: its size and flush reason, duration (s), waits of its calls (s), failed calls,
cells, cells of padding, and calls of the function that ran out of memory.
"""

MOST_UNREAD: Final = 256
"""Most ended batches that are kept before they are added to the counts."""


class Recorder:
    """Counts of one batcher, updated from any thread.

    A call or a batch takes a few operations, an item none.
    """

    def __init__(self) -> None:
        # reentrant: a signal handler may read statistics at any moment
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        with self._lock:
            numbers = itertools.count()
            self.accepted = numbers.__next__
            """Count a call. No lock is needed: taking the next number is atomic."""
            self._looks = 0  # numbers that `snapshot` has taken
            self._errors = self._cancelled = self._timed_out = self._rejected = 0  # calls
            # positions in batches of items with lengths, and positions that are padding
            self._cells = self._padding = 0
            self._memory_errors = 0  # calls of the function
            self._processing = 0.0  # sum over all batches (s)
            self._waits = _Histogram()  # one entry per call
            self._durations = _Histogram()  # one entry per batch
            self._batches: Counter[tuple[int, FlushReason]] = Counter()  # by size and flush reason
            self._latest: deque[_Ended] = deque()  # ended batches that are not in the counts yet

    def renew_lock(self) -> None:
        """Replace the lock in a forked process, where the thread that held it is gone."""
        self._lock = threading.RLock()

    def cancelled(self) -> None:
        with self._lock:
            self._cancelled += 1

    def timed_out(self) -> None:
        with self._lock:
            self._timed_out += 1

    def rejected(self) -> None:
        with self._lock:
            self._rejected += 1

    def ended(self, batch: Batch, errors: int) -> None:
        """Count a batch that has ended, with `errors` failed calls.

        No lock is needed: appending is atomic.
        """
        latest = self._latest
        latest.append(
            (
                (batch.size, batch.reason),
                batch.ended - batch.started,
                batch.waits,
                errors,
                batch.cells,
                batch.padding,
                len(batch.too_big),
            )
        )
        if len(latest) >= MOST_UNREAD:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Add the latest batches to the counts."""
        latest: list[_Ended] = []
        # no test for emptiness: a signal handler may take the last batch after the test
        with contextlib.suppress(IndexError):
            while True:
                latest.append(self._latest.popleft())
        if not latest:
            return
        kinds, durations, waits, errors, cells, padding, memory_errors = zip(*latest, strict=True)
        self._batches.update(kinds)
        self._processing += sum(durations)
        self._durations.add(list(durations))
        self._waits.add(list(chain.from_iterable(waits)))
        self._errors += sum(errors)
        self._cells += sum(cells)
        self._padding += sum(padding)
        self._memory_errors += sum(memory_errors)

    def snapshot(self, queue_size: int, blocked: int, in_flight: int) -> Stats:
        with self._lock:
            self._count()
            sizes: Counter[int] = Counter()
            reasons: Counter[str] = Counter()
            for (size, reason), count in self._batches.items():
                sizes[size] += count
                reasons[reason] += count
            batches = sum(sizes.values())
            items = sum(size * count for size, count in sizes.items())
            calls = self.accepted() - self._looks
            self._looks += 1
            return Stats(
                queue_size=queue_size,
                blocked=blocked,
                in_flight=in_flight,
                total_processed=items,
                total_batches=batches,
                avg_batch_size=items / batches if batches else 0.0,
                avg_processing_time=self._processing / batches if batches else 0.0,
                calls=calls,
                errors=self._errors,
                cancelled=self._cancelled,
                timed_out=self._timed_out,
                rejected=self._rejected,
                queue_wait=self._waits.percentiles(),
                processing_time=self._durations.percentiles(),
                padding_waste=self._padding / self._cells if self._cells else 0.0,
                memory_errors=self._memory_errors,
                batch_sizes=dict(sorted(sizes.items())),
                flush_reasons=dict(reasons),
            )
