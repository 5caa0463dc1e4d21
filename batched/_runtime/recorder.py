"""Counts and times: of one batcher (`Recorder`), and of all batchers of the process (`totals`).

The counts of the process keep growing when a batcher is gone or its statistics are set to zero.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final, Literal
from weakref import WeakValueDictionary

from .._core.linger import FlushReason
from .._core.scheduler import Batch
from ..stats import Percentiles, Stats

PER_OCTAVE: Final = 12
"""Buckets of a histogram for each doubling of the duration: 2 ** (1 / 12) = 1.06."""
SHORTEST: Final = 1e-6
"""Begin of the first bucket (s)."""
OCTAVES: Final = 37
"""Doublings of `SHORTEST`: 2 ** 37 microseconds are 38 hours."""
ENDS: Final = [SHORTEST * 2 ** (end / PER_OCTAVE) for end in range(1, PER_OCTAVE * OCTAVES)]
"""Ends of the buckets (s); the last bucket has none."""
ENDS.append(math.inf)


class _Histogram:
    """Counts of durations in buckets 6 % wide, from a microsecond to a day.

    Memory is fixed. Many durations of similar length take only one or two look-ups.
    """

    def __init__(self) -> None:
        self.counts = [0] * len(ENDS)

    def add(self, durations: list[float]) -> None:
        """Count `durations` (s), and sort the list in place."""
        durations.sort()
        low = 0
        while low < len(durations):
            bucket = bisect_left(ENDS, durations[low])
            high = bisect_right(durations, ENDS[bucket], low)
            self.counts[bucket] += high - low
            low = high

    def percentiles(self) -> Percentiles:
        """Return the percentiles of all counted durations: the middles of their buckets.

        A percentile is the shortest duration that is not exceeded by its share of all.
        """
        totals = list(accumulate(self.counts))
        if not totals[-1]:
            return Percentiles(0.0, 0.0, 0.0)
        buckets = [
            bisect_left(totals, math.ceil(share * totals[-1])) for share in (0.50, 0.95, 0.99)
        ]
        return Percentiles(*[SHORTEST * 2 ** ((bucket + 0.5) / PER_OCTAVE) for bucket in buckets])


Ending = Literal["cancelled", "lost", "timed_out", "rejected"]
"""End of a call without a batch: see the fields of `Stats`."""

RowEnding = Literal["finished", "failed", "given up"]
"""End of a row of a function that works in steps."""

_Ended = tuple[tuple[int, FlushReason], float, Sequence[float], int, int, int, int]
"""Ended batch: its size and flush reason, duration (s), waits of its calls (s), failed calls,
cells, cells of padding, and calls of the function that ran out of memory.
"""

MOST_UNREAD: Final = 256
"""Most ended batches that are kept before they are added to the counts."""

SHORT_GAP: Final = 2e-4
"""Longest mean time between the batches of a loop (s).

A loop over calls takes 30 to 60 us on an idle machine. Requests over HTTP take 500 us or more.
"""
MANY_CALLS: Final = 1000
"""Least calls in a row for a warning of single calls."""
LONG: Final = 1.0
"""Least time of these calls in the batch function (s): below, a list would gain little."""


Counts = Counter[tuple[str, str]]
"""Numbers by name and label; see `Recorder.counts`. Durations are counted by octave: octave n ends
at `SHORTEST * 2 ** (n + 1)`.
"""

_recorders: WeakValueDictionary[int, Recorder] = WeakValueDictionary()
"""Recorders of live batchers, by id."""
_totals_lock = threading.RLock()  # guards `_past`; reentrant: a signal handler may read statistics
_past: dict[str, Counts] = {}
"""Counts of batchers that are gone, and counts before `reset`, by function."""
_ended: deque[tuple[str, Counts]] = deque()
"""Counts that are not in `_past` yet: a finalizer may add some at any moment, without the lock."""


class Sink:
    """Reader of the counts of this process."""

    def after_fork(self) -> None:
        """Begin anew in a forked process."""

    def close(self) -> None:
        """Take the last counts, because the interpreter exits."""


sink: Sink | None = None
"""The reader of this process, if there is one."""


def _live() -> list[Recorder]:
    return [each for ref in _recorders.valuerefs() if (each := ref()) is not None]


def totals() -> dict[str, Counts]:
    """Return the counts of this process since its start, by function."""
    with _totals_lock:
        live = _live()
        while _ended:
            name, counts = _ended.popleft()
            _past.setdefault(name, Counter()).update(counts)
        found = {name: Counter(counts) for name, counts in _past.items()}
        for recorder in live:
            found.setdefault(recorder._name, Counter()).update(recorder.counts())
        return found


def after_fork() -> None:
    """Begin anew in a forked process."""
    global _totals_lock
    _totals_lock = threading.RLock()
    _past.clear()
    _ended.clear()
    for recorder in _live():
        recorder.after_fork()
    if sink is not None:
        sink.after_fork()


class Recorder:
    """Counts of one batcher, updated from any thread.

    A call or a batch costs a few operations, an item none.
    """

    _name = ""

    def __init__(self, name: str) -> None:
        """Make a recorder of the function `name`; without a name, `totals` leaves it out."""
        # reentrant: a signal handler may read statistics at any moment
        self._lock = threading.RLock()
        self._begin()
        self._name = name  # last: without it, `__del__` has nothing to keep
        if name:
            _recorders[id(self)] = self
        if len(_ended) > MOST_UNREAD:
            totals()

    def __del__(self) -> None:
        if self._name:
            _ended.append((self._name, self.counts()))

    def reset(self) -> None:
        """Set all counts to zero."""
        with _totals_lock, self._lock:
            if self._name:
                _ended.append((self._name, self.counts()))
            self._begin()

    def after_fork(self) -> None:
        """Set all counts to zero in a forked process, whose parent counts the calls until now."""
        self._lock = threading.RLock()  # the thread that held the old lock is gone
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            numbers = itertools.count()
            self.accepted = numbers.__next__
            """Count a call. No lock is needed: taking the next number is atomic."""
            self._looks = 0  # numbers that `snapshot` has taken
            self._endings: Counter[Ending] = Counter()  # calls that ended without a batch
            self._errors = 0  # calls that a batch has failed
            # positions in batches of items with lengths, and positions that are padding
            self._cells = self._padding = 0
            self._memory_errors = 0  # calls of the function
            self._steps = self._rows = self._places = 0  # of functions that work in steps
            self._row_endings: Counter[str] = Counter()
            self._processing = 0.0  # sum over all batches (s)
            self._waiting = 0.0  # sum over all calls (s)
            self._items = 0  # in ended batches
            self._waits = _Histogram()  # one entry per call
            self._durations = _Histogram()  # one entry per batch
            self._batches: Counter[tuple[int, FlushReason]] = Counter()  # by size and flush reason
            self._latest: deque[_Ended] = deque()  # ended batches that are not in the counts yet
            # number of next calls whose threads `_watch` asks for; only calls that wait for results
            self.asks = 0
            self._caller = 0  # thread of the last of them
            self._same_caller = True  # whether all of them since `_start` came from that thread
            self._is_loop = False  # whether one thread has called item by item, for long
            # a moment (s), with the time in batches (s), the batches and the items until then
            self._start: tuple[float, ...] = 0.0, 0.0, 0, 0

    def count(self, ending: Ending) -> None:
        """Count a call that ended without a batch."""
        with self._lock:
            self._endings[ending] += 1

    def waited(self, waits: Sequence[float]) -> None:
        """Count the waits of calls that leave the queue without a batch of this process (s)."""
        with self._lock:
            self._waiting += sum(waits)
            self._waits.add(list(waits))

    def memory_error(self) -> None:
        """Count a call of the function that ran out of memory."""
        with self._lock:
            self._memory_errors += 1

    def stepped(self, rows: int, places: int) -> None:
        """Count a step of `rows` live rows, of at most `places`."""
        with self._lock:
            self._steps += 1
            self._rows += rows
            self._places += places

    def row_ended(self, ending: RowEnding) -> None:
        """Count a row that has ended."""
        with self._lock:
            self._row_endings[ending] += 1

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
                self._watch(batch.ended)

    def note_caller(self) -> bool:
        """Note the thread of a call. Return whether this thread has long called item by item."""
        before, self._caller = self._caller, threading.get_ident()
        self._same_caller &= before == self._caller
        self.asks -= 1
        return self._is_loop and self._same_caller

    def _watch(self, now: float) -> None:
        """Look for one thread that calls item by item, as `Series.map` of pandas does.

        The evidence: batches of one item each, with nearly no time between them, and after each
        `MOST_UNREAD` batches two calls of the same thread, which waits for their results. The calls
        are sampled, because looking at each call would cost a lone caller more.
        """
        counts = self._batches
        items = sum([size * count for (size, _), count in counts.items()])
        totals = now, self._processing, sum(counts.values()), items
        span, busy, batches, items = map(operator.sub, totals, self._start)
        single = items == batches and span - busy < batches * SHORT_GAP
        if not single or self.asks or not self._same_caller:
            self._start, self._same_caller, batches = totals, True, 0
        self._is_loop = batches >= MANY_CALLS and busy >= LONG
        self.asks = 2 * single

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
        self._items += sum([size for size, _ in kinds])
        self._durations.add(list(durations))
        all_waits = list(chain.from_iterable(waits))
        self._waiting += sum(all_waits)
        self._waits.add(all_waits)
        self._errors += sum(errors)
        self._cells += sum(cells)
        self._padding += sum(padding)
        self._memory_errors += sum(memory_errors)

    def _calls(self) -> int:
        self._looks += 1
        return self.accepted() - self._looks + 1

    def counts(self) -> Counts:
        """Return all counts under plain names, for sums over batchers and processes."""
        with self._lock:
            self._count()
            found: Counts = Counter(
                {
                    ("calls", ""): self._calls(),
                    ("items", ""): self._items,
                    ("failed", "error"): self._errors,
                    ("tokens", ""): self._cells,
                    ("padding", ""): self._padding,
                    ("memory_errors", ""): self._memory_errors,
                    ("steps", ""): self._steps,
                    ("live_rows", ""): self._rows,
                    ("processing_sum", ""): self._processing,
                    ("wait_sum", ""): self._waiting,
                }
            )
            for reason, count in self._endings.items():
                found["failed", reason] += count
            for ending, count in self._row_endings.items():
                found["rows", ending] += count
            for (size, flush_reason), count in self._batches.items():
                found["batches", flush_reason] += count
                found["size", str(size)] += count
            for name, histogram in ("wait", self._waits), ("processing", self._durations):
                for octave in range(OCTAVES):
                    first = octave * PER_OCTAVE
                    found[name, str(octave)] += sum(histogram.counts[first : first + PER_OCTAVE])
            return +found  # without zeros

    def snapshot(self, queue_size: int, blocked: int, in_flight: int) -> Stats:
        """Return all counts, with the present load of the queue (see `Stats`)."""
        with self._lock:
            self._count()
            sizes: Counter[int] = Counter()
            reasons: Counter[str] = Counter()
            for (size, reason), count in self._batches.items():
                sizes[size] += count
                reasons[reason] += count
            batches, items = sum(sizes.values()), self._items
            calls = self._calls()
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
                cancelled=self._endings["cancelled"],
                lost=self._endings["lost"],
                timed_out=self._endings["timed_out"],
                rejected=self._endings["rejected"],
                queue_wait=self._waits.percentiles(),
                processing_time=self._durations.percentiles(),
                padding_waste=self._padding / self._cells if self._cells else 0.0,
                memory_errors=self._memory_errors,
                batch_sizes=dict(sorted(sizes.items())),
                flush_reasons=dict(reasons),
                steps=self._steps,
                rows_per_step=self._rows / self._steps if self._steps else 0.0,
                places_filled=self._rows / self._places if self._places else 0.0,
                row_endings=dict(self._row_endings),
            )
