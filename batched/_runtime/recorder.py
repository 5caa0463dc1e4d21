"""Counts of one batcher, for `fn.stats` and for meters."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from .._core.scheduler import Batch
from ..stats import Stats
from . import observer
from .summary import EndedBatch, count_batches, count_durations, make_stats

MOST_UNREAD: Final = 256
"""Most ended batches that are kept before they are added to the counts."""


class Recorder:
    """Counts of one batcher, updated from any thread. `summary` explains their names.

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
        self._latest = deque[EndedBatch]()  # ended batches that are not counted yet

    def renew(self) -> None:
        """Begin anew in a forked process; its parent counts the calls until now."""
        observer.renew()
        Recorder.__init__(self, self._name)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.flush()
        self._counts.clear()

    def add(self, counts: dict[Any, Any]) -> None:
        """Add numbers to the counts."""
        with self._lock:
            for key, number in counts.items():
                self._counts[key] += number
        if observer.meters:
            observer.note(self._name, counts)

    def count(self, event: str) -> None:
        """Count the end of a call without a batch, the end of a row, or another event."""
        self.add({event: 1})

    row_ended = count

    def waited(self, waits: Sequence[float]) -> None:
        """Count the waits of calls that leave the queue without a batch of this process (s)."""
        self.add(count_durations("queue_wait_seconds", waits))

    def memory_error(self) -> None:
        """Count a call of the function that ran out of memory."""
        self.count("memory_errors")

    def stepped(self, rows: int, places: int) -> None:
        """Count a step of `rows` live rows, of at most `places`."""
        self.add({"steps": 1, "live_rows": rows, "places": places})

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
        latest = []
        with self._lock:
            with suppress(IndexError):  # a signal handler may take the last batch at any moment
                while True:
                    latest.append(self._latest.popleft())
            calls = int(repr(self._accepted).strip("count()")) - self._known
            self._known += calls
            self.add({"calls": calls, **count_batches(latest)})

    @property
    def is_alone(self) -> bool:
        """Whether batches have ended, each of one item."""
        self.flush()
        return self._counts["items"] == self._counts["batch_size", 1] > 0

    def snapshot(self, *load: int) -> Stats:
        """Return all counts, with the present load of the queue: the first fields of `Stats`."""
        self.flush()
        return make_stats(self._counts.copy(), *load)
