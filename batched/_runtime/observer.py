"""Observers of batches: `on_batch`, the probe, and meters. Their failures affect no call."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .._core.scheduler import Batch
from .._execution.attempts import Outcomes
from ..stats import BatchRecord
from .notices import LogOnce
from .waits import between_runs

Observer = Callable[[Batch, Outcomes], None]
"""Reporter of a batch, called after its callers were answered. It never raises."""

probe: Any = None
"""The `_operations.probe.Probe` that runs all batches of this process, if they are traced."""

meters: list[Callable[[str, Any, float], object]] = []
"""Functions of the name of a batched function, of a count (see `recorder`) and of a number. They
get all counts from their registration on.
"""

share: Any = None
"""Function that lets other processes see the load of this one, if they are to. It is called when a
call was accepted and when a batch has ended, and writes only now and then unless its argument is
true.
"""
due = 0.0
"""Moment from which on `share` writes again (s)."""

reporting = threading.RLock()
"""Lock for the use of instruments. It is held while the process forks: locks of instruments that a
thread uses at that moment would stay locked in the child.
"""
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=reporting.acquire,
        after_in_parent=reporting.release,
        after_in_child=reporting.release,
    )

_failing_meter = LogOnce("metrics could not be recorded")
_lock: Any
_unreported: Counter[tuple[str, Any]]


def renew() -> None:
    """Begin anew in a forked process; its parent reports the counts until now."""
    global _lock, _unreported, due
    _lock, _unreported, due = threading.RLock(), Counter(), 0.0


renew()


def note(name: str, counts: Mapping[Any, Any]) -> None:
    """Keep counts of the function `name` for the next report. A finalizer may call it."""
    with _lock:
        _unreported.update({(name, key): number for key, number in counts.items()})


def report() -> None:
    """Pass the counts since the last report to all meters. They may take locks."""
    global _unreported
    with _lock:
        counts, _unreported = _unreported, Counter()
    for meter in meters:
        with reporting, _failing_meter:
            for (name, key), number in counts.items():
                meter(name, key, number)


def make_observer(name: str, hook: Callable[[BatchRecord], object]) -> Observer:
    """Return the observer that calls `hook` with records of the batches of the function `name`."""
    failing = LogOnce(f"on_batch of {name} raised")

    def observe(batch: Batch, outcomes: Outcomes) -> None:
        with failing, between_runs():
            hook(_record(name, batch, outcomes))

    return observe


def _record(name: str, batch: Batch, outcomes: Outcomes) -> BatchRecord:
    slices, results, _ = outcomes
    fails = [issubclass(type(result), BaseException) for result in results]
    tested = list(zip(slices, fails, strict=True))
    # calls that fail as a whole
    lost = {request for (request, _, _), fail in tested if fail and not request.separate}
    failed = sum(
        [stop - start for (request, start, stop), fail in tested if fail or request in lost]
    )
    requests = {request for request, _, _ in slices}
    return BatchRecord(
        name=name,
        size=batch.size,
        calls=len(requests),
        tokens=batch.cells,
        padding_waste=batch.padding / batch.cells if batch.cells else 0.0,
        flush_reason=batch.reason,
        oldest_wait=batch.started - min([request.arrived for request in requests]),
        processing_time=batch.ended - batch.started,
        attempts=batch.attempts,
        outcome="ok" if not failed else "failed" if failed == batch.size else "partial",
        failed=failed,
        error=type(results[fails.index(True)]).__name__ if failed else None,
    )
