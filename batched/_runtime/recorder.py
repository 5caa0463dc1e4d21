"""Counts of one batcher, for `fn.stats` and for meters.

A count has the name of a metric or, if the metric has labels, the value of the label; two are no
metrics, `places` and `processing`, a sum of seconds. A pair is a histogram's name and one of its
values: a size, or a duration (s).
"""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from .._core.linger import FlushReason
from .._core.scheduler import Batch
from ..stats import Percentiles, Stats
from . import observer

REASONS: Final = get_args(FlushReason)
FAILURES: Final = "cancelled", "lost", "timed_out", "rejected"
"""Ends of calls without a batch: see the fields of `Stats`."""
ROW_ENDINGS: Final = "finished", "failed", "given up"

MOST_UNREAD: Final = 256
"""Most ended batches that are kept before they are added to the counts."""
SHORTEST: Final = 1e-6
"""Shortest duration that is told apart from shorter ones (s)."""

_EndedBatch = tuple[int, float, int, int, int, int, FlushReason, Sequence[float]]
"""Ended batch: the numbers that `_SUMS` names, its flush reason, and waits of its calls (s)."""
_SUMS: Final = "items", "processing", "error", "tokens", "padding_tokens", "memory_errors"
"""Counts that are sums of the first numbers of ended batches."""


class Recorder:
    """Counts of one batcher, updated from any thread.

    A call or a batch costs a few operations, an item none.
    """

    def __init__(self, name: str = "") -> None:
        """Make a recorder of the function `name`."""
        self._name = name
        # reentrant: a signal handler may read statistics at any moment
        self._lock = threading.RLock()
        self._accepted = itertools.count()
        self.accept = self._accepted.__next__
        """Count an accepted call. No lock is needed: taking the next number is atomic.

        The next number also stands in the text of the counter, so reading it takes none.
        """
        self._known = 0  # accepted calls that are in the counts
        self._counts = Counter[Any]()
        self._latest = deque[_EndedBatch]()  # ended batches that are not counted yet

    def renew(self) -> None:
        """Begin anew in a forked process; its parent counts the calls until now."""
        Recorder.__init__(self, self._name)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.flush()
        self._counts.clear()

    def add(self, counts: Mapping[Any, Any]) -> None:
        """Add numbers to the counts."""
        with self._lock:
            self._counts.update(counts)
        if observer.meters:
            observer.note(self._name, counts)

    def count(self, event: str) -> None:
        """Count the end of a call without a batch, the end of a row, or another event."""
        self.add({event: 1})

    def waited(self, waits: Sequence[float]) -> None:
        """Count the waits of calls that leave the queue without a batch of this process (s)."""
        self.add(_count_durations("queue_wait_seconds", waits))

    def ended(self, batch: Batch, errors: int) -> None:
        """Count a batch that has ended, with `errors` failed calls.

        No lock is needed: appending is atomic.
        """
        seconds, too_big = batch.ended - batch.started, len(batch.too_big)
        numbers = batch.size, seconds, errors, batch.cells, batch.padding, too_big
        self._latest.append((*numbers, batch.reason, batch.waits))
        if len(self._latest) >= MOST_UNREAD:
            self.flush()

    def flush(self) -> None:
        """Add the latest calls and batches to the counts."""
        with self._lock:
            latest = [self._latest.popleft() for _ in range(len(self._latest))]
            calls = int(repr(self._accepted).strip("count()")) - self._known
            self._known += calls
            self.add({"calls": calls, **_count_batches(latest)})

    def snapshot(self, queue_size: int, blocked: int, in_flight: int) -> Stats:
        """Return all counts, with the present load of the queue."""
        self.flush()
        counts: Any = self._counts.copy()
        sizes = _histogram(counts, "batch_size")
        items, batches, steps = counts["items"], sum(sizes.values()), counts["steps"]
        return Stats(
            queue_size,
            blocked,
            in_flight,
            total_processed=items,
            total_batches=batches,
            avg_batch_size=items / (batches or 1),
            avg_processing_time=counts["processing"] / (batches or 1),
            errors=counts["error"],
            queue_wait=_percentiles(_histogram(counts, "queue_wait_seconds")),
            processing_time=_percentiles(_histogram(counts, "processing_seconds")),
            padding_waste=counts["padding_tokens"] / (counts["tokens"] or 1),
            batch_sizes=sizes,
            flush_reasons={each: counts[each] for each in REASONS if counts[each]},
            rows_per_step=counts["live_rows"] / (steps or 1),
            places_filled=counts["live_rows"] / (counts["places"] or 1),
            row_endings={each: counts[each] for each in ROW_ENDINGS if counts[each]},
            **{name: counts[name] for name in ("calls", "memory_errors", "steps", *FAILURES)},
        )


def _count_batches(ended: Sequence[_EndedBatch]) -> dict[Any, Any]:
    if not ended:
        return {}
    *numbers, reasons, waits = zip(*ended, strict=True)
    sums = zip(_SUMS, map(sum, numbers), strict=True)
    return {
        **{name: total for name, total in sums if total},
        **Counter(reasons),
        **Counter([("batch_size", size) for size in numbers[0]]),
        **_count_durations("processing_seconds", numbers[1]),
        **_count_durations("queue_wait_seconds", [*itertools.chain(*waits)]),
    }


def _count_durations(name: str, durations: Sequence[float]) -> dict[Any, int]:
    """Return the counts of a histogram. Buckets are 1.1 % wide, and stand for their middles."""
    places = [math.ceil(64 * math.log2(max(each, SHORTEST))) for each in durations]
    return {(name, 2 ** (place / 64 - 1 / 128)): n for place, n in Counter(places).items()}


def _histogram(counts: Mapping[Any, int], name: str) -> dict[Any, int]:
    """Return the counts of each value of a histogram, the smallest value first."""
    return {key[1]: counts[key] for key in sorted(key for key in counts if key[0] == name)}


def _percentiles(histogram: Mapping[float, int]) -> Percentiles:
    """Return the shortest durations that are not exceeded by their shares of all durations."""
    totals = list(itertools.accumulate(histogram.values()))
    ranks = [bisect_left(totals, share * totals[-1]) for share in (0.50, 0.95, 0.99) if totals]
    return Percentiles(*[[*histogram][rank] for rank in ranks] or [0.0] * 3)
