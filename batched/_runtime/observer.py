"""Calls of `on_batch`. Their failures do not affect callers."""

from __future__ import annotations

from collections.abc import Callable

from .._core.scheduler import Batch
from .._execution.attempts import Outcomes
from ..stats import BatchRecord
from .waits import between_runs
from .wakers import log_failure

Observer = Callable[[Batch, Outcomes], None]
"""Reporter of a batch, called after its callers were answered. It never raises."""


def make_observer(name: str, hook: Callable[[BatchRecord], object]) -> Observer:
    """Return the observer that calls `hook` with records of the batches of the function `name`."""
    failed = False  # whether a failure was logged; later failures are not

    def observe(batch: Batch, outcomes: Outcomes) -> None:
        nonlocal failed
        try:
            with between_runs():
                hook(_record(name, batch, outcomes))
        except BaseException:
            if not failed:
                failed = True
                log_failure("on_batch of %s raised; further failures of it are not logged", name)

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
