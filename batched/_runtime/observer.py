"""Calls of `on_batch`, whose failures do not affect callers; and the probe of all batches."""

from __future__ import annotations

from collections.abc import Callable

from .._core.scheduler import Batch
from .._execution.attempts import Outcomes
from ..stats import BatchRecord
from .waits import between_runs
from .wakers import log_failure

Observer = Callable[[Batch, Outcomes], None]
"""Reporter of a batch, called after its callers were answered. It never raises."""


class Probe:
    """Probe of every batch of every function in this process. Its methods never raise."""

    def origin(self) -> object:
        """Return the origin of a call. Called where the call is made."""

    def began(self, name: str, batch: Batch) -> object:
        """Note that `batch` of the function `name` begins in this thread or task.

        Return the first argument of `ended`. After None, `ended` is not called.
        """

    def joined(self, name: str, batch: Batch) -> None:
        """Note that the rows of `batch` join the run of this thread or task."""

    def ended(self, began: object, name: str, batch: Batch, outcomes: Outcomes) -> None:
        """Note that `batch` has ended; its callers have no answer yet."""


probe: Probe | None = None
"""The probe of this process, if there is one."""


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
