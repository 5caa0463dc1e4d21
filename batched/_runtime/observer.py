"""Calls of `on_batch`. Their failures do not affect callers."""

from __future__ import annotations

from collections.abc import Callable

from .._core.scheduler import Batch
from .._execution.attempts import Outcomes
from ..stats import BatchRecord
from .waits import between_runs
from .wakers import log_failure


class Observer:
    """The user's hook for the batches of one function."""

    def __init__(self, name: str, hook: Callable[[BatchRecord], object]) -> None:
        self._name = name  # name of the batch function
        self._hook = hook
        self._failed = False  # whether a failure was logged; later failures are not

    def observe(self, batch: Batch, outcomes: Outcomes) -> None:
        """Call the hook with a record of `batch`, after its callers were answered. Never raise."""
        try:
            with between_runs():
                self._hook(self._record(batch, outcomes))
        except BaseException:
            if not self._failed:
                self._failed = True
                log_failure(
                    "on_batch of %s raised; further failures of it are not logged", self._name
                )

    def _record(self, batch: Batch, outcomes: Outcomes) -> BatchRecord:
        slices, results, _ = outcomes
        fails = [issubclass(type(result), BaseException) for result in results]
        # calls that fail as a whole
        lost = {
            request
            for (request, _, _), fail in zip(slices, fails, strict=True)
            if fail and not request.separate
        }
        failed = sum(
            [
                stop - start
                for (request, start, stop), fail in zip(slices, fails, strict=True)
                if fail or request in lost
            ]
        )
        requests = {request for request, _, _ in slices}
        return BatchRecord(
            name=self._name,
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
