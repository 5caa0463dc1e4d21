"""Statistics of a batcher: `Stats`, a frozen snapshot, and the recorder that makes it."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final, Literal

from ._core.linger import FlushReason
from ._core.scheduler import Batch

__all__ = ["BatchRecord", "Percentiles", "Stats"]


@dataclass(frozen=True)
class BatchRecord:
    """One batch that has ended, as `on_batch` is told of it."""

    name: str
    """The batch function's."""
    size: int
    """Items in it."""
    calls: int
    """Calls of which it had items."""
    tokens: int
    """Positions that the function was given, padding included, as the lengths of the items have it;
    0 where they have none.
    """
    padding_waste: float
    """Share of these that was padding."""
    flush_reason: FlushReason
    """Why it left: full, settled, timeout, eager or drain."""
    oldest_wait: float
    """From the arrival of its oldest call to forming it (s)."""
    processing_time: float
    """From forming it to having its results (s)."""
    attempts: int
    """Calls of the function: more than one if it ran in parts."""
    outcome: Literal["ok", "partial", "failed"]
    """Whether all its items have results, some, or none."""
    failed: int
    """Items that have an error instead of a result; all items of a call of which one has."""
    error: str | None
    """The type of the first of these errors, by name; None if there is none."""


@dataclass(frozen=True)
class Percentiles:
    """Three percentiles of a duration, in seconds, each within 3 % of the exact one between 1 us
    and a day; 0.0 while there is none.
    """

    p50: float
    """Half were at most this long (s)."""
    p95: float
    """Nineteen of twenty were at most this long (s)."""
    p99: float
    """Ninety-nine of a hundred were at most this long (s)."""

    def __str__(self) -> str:
        return f"p50 {_duration(self.p50)}, p95 {_duration(self.p95)}, p99 {_duration(self.p99)}"


@dataclass(frozen=True, repr=False)
class Stats:
    """A snapshot of one batcher. Counts run from its creation or the last `reset_stats()`;
    `queue_size` and `in_flight` are of now.
    """

    queue_size: int
    """Items that wait in the queue now."""
    blocked: int
    """Calls that wait now for room in the queue."""
    in_flight: int
    """Items without an answer in batches that are running now."""
    total_processed: int
    """Items in batches that have ended, well or badly."""
    total_batches: int
    """Batches that have ended, well or badly."""
    avg_batch_size: float
    """`total_processed / total_batches` in items; 0.0 before the first batch."""
    avg_processing_time: float
    """Mean time from forming a batch to having its results (s); 0.0 before the first batch."""
    calls: int
    """Calls accepted, whether of one item or of many."""
    errors: int
    """Calls that ended with an exception of the batch function."""
    cancelled: int
    """Calls that ended unanswered: given up by their callers, cancelled at shutdown, or lost with
    their event loop.
    """
    timed_out: int
    """Calls that ended unanswered because nothing of them had begun to run within
    `queue_timeout_ms`.
    """
    rejected: int
    """Calls refused because the batcher was closed, or its queue full."""
    queue_wait: Percentiles
    """From the arrival of a call to the start of its first batch (s)."""
    processing_time: Percentiles
    """From forming a batch to having its results (s)."""
    padding_waste: float
    """Share of what the batch function was given that was padding, in batches whose items have a
    length; 0.0 before there is one.
    """
    memory_errors: int
    """Calls of the function that ran out of memory and were made again in smaller parts."""
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
    if seconds < 0.9995e-3:  # what three digits would still round up to the next unit
        unit, value = "us", seconds * 1e6
    elif seconds < 0.9995:
        unit, value = "ms", seconds * 1e3
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"


class _Histogram:
    """Counts of durations in buckets 6 % wide, from a microsecond to a day; fixed memory, and for
    many of like length a look or two.
    """

    PER_OCTAVE: Final = 12  # 2 ** (1 / 12) = 1.06
    SHORTEST: Final = 1e-6
    OCTAVES: Final = 37  # 2 ** 37 microseconds are 38 hours

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(ENDS) + 1)

    def add(self, durations: list[float]) -> None:
        """Counts `durations` (s), and sorts them."""
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
        """The middle of the bucket that holds the smallest duration which `share` of all do not
        exceed.
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
"""Ends of the buckets of a histogram, but for the last (s)."""


MOST_UNREAD: Final = 256
"""Batches that are kept as they are until somebody reads the statistics."""


class Recorder:
    """Counts what happens to one batcher, from any thread; a few operations per call and per batch,
    none per item.
    """

    def __init__(self) -> None:
        # so that a signal handler may look at statistics wherever it comes in
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Starts counting from zero."""
        with self._lock:
            numbers = itertools.count()
            self.accepted = numbers.__next__
            """Counts a call, without a lock: taking a number is one step."""
            self._looks = 0  # numbers that were taken by nobody but `snapshot`
            self._errors = self._cancelled = self._timed_out = self._rejected = 0  # calls
            # positions in batches whose items have a length, and those of them that are padding
            self._cells = self._padding = 0
            self._memory_errors = 0  # calls of the function
            self._processing = 0.0  # seconds, all batches together
            self._waits = _Histogram()  # one entry per call
            self._durations = _Histogram()  # one entry per batch
            self._batches: Counter[tuple[int, FlushReason]] = Counter()  # by size and flush reason
            self._latest: deque[Batch] = deque()  # batches that none of these knows of yet

    def renew_lock(self) -> None:
        """Makes this usable in a forked process, where whoever held the lock is gone."""
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
        """Counts a finished batch, which nobody needs any more, and the calls that it failed;
        without a lock, for appending is one step.
        """
        batch.slices = []  # whose items are not to be kept
        batch.errors = errors
        self._latest.append(batch)
        if len(self._latest) >= MOST_UNREAD:
            with self._lock:
                self._count()

    def _count(self) -> None:
        """Adds up the latest batches."""
        latest: list[Batch] = []
        # a look whether there is one would not do: a signal handler may take it after that
        with contextlib.suppress(IndexError):
            while True:
                latest.append(self._latest.popleft())
        self._batches.update(map(attrgetter("size", "reason"), latest))
        durations = [batch.ended - batch.started for batch in latest]
        self._processing += sum(durations)
        self._durations.add(durations)
        self._waits.add(list(chain.from_iterable(map(attrgetter("waits"), latest))))
        self._errors += sum(map(attrgetter("errors"), latest))
        self._cells += sum(map(attrgetter("cells"), latest))
        self._padding += sum(map(attrgetter("padding"), latest))
        self._memory_errors += sum(map(len, map(attrgetter("too_big"), latest)))

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
