"""Errors that a call can raise besides those of the batch function itself.

BatchedError
├── BatchFunctionError(RuntimeError)   the function broke its contract
│   └── BatchSizeMismatch              it returned more or fewer results than it got items
├── CollationError(ValueError)         the features of a call make no batch
├── QueueFull(RuntimeError)            the queue has no room, and `on_full` is "raise"
├── QueueTimeout(TimeoutError)         the call waited too long, and no item of it ran
├── BatcherClosed(RuntimeError)        the batcher was shut down before it could answer
│   └── ServerGone                     the model process of a connected function is not there
├── EndpointError(RuntimeError)        a service has no usable answer to a prompt or text
├── SourceError(ValueError)            `batched.offline` cannot read rows, keys or columns
├── RunLocked(RuntimeError)            another run has the progress file
├── RunMismatch(ValueError)            the progress file was written by other steps
├── RunStopped(RuntimeError)           too many rows or batches failed for a run to go on
├── ResultError(ValueError)            the result of an offline run cannot be written
├── TimeLimitExceeded(RuntimeError)    offline: a call of the function took longer than `timeout_s`
├── WorkerDied(RuntimeError)           offline: the process that ran the function ended
└── RemoteError                        any error in another process, as text
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BatchFunctionError",
    "BatchSizeMismatch",
    "BatchedError",
    "BatcherClosed",
    "CollationError",
    "EndpointError",
    "QueueFull",
    "QueueTimeout",
    "RemoteError",
    "ResultError",
    "RunLocked",
    "RunMismatch",
    "RunStopped",
    "ServerGone",
    "SourceError",
    "TimeLimitExceeded",
    "WorkerDied",
]


class BatchedError(Exception):
    """Base class of all errors that this library itself raises."""


class BatchFunctionError(BatchedError, RuntimeError):
    """Error of a batch function that broke its contract.

    The function returned an object without results, or raised an exception that callers would
    mistake. `SystemExit`, `KeyboardInterrupt`, `CancelledError`, `GeneratorExit`, `StopIteration`
    and `StopAsyncIteration` mean something else to waiting code. So callers get this error, with
    the original as its `__cause__`.
    """


class BatchSizeMismatch(BatchFunctionError):
    """Error of a batch function that returned more or fewer results than it got items.

    Every caller of the batch gets this error.
    """

    expected: int
    """Items that the function got."""
    actual: int
    """Results that it returned."""

    @classmethod
    def between(cls, name: str, expected: int, actual: int, where: str = "") -> BatchSizeMismatch:
        """Return the error of the function `name`, for its output or the part `where` of it."""
        place = (
            f" in {where!r} of its output, of which every array needs as many (a list or tuple "
            "holds arrays, not rows)"
            if where
            else ""
        )
        one = " (squeeze() of one row removes its axis)" if expected == 1 < actual else ""
        error = cls(
            f"{name} was given {expected} items and returned {actual} results{place}; it "
            f"must return one per item, in order{one}"
        )
        error.expected, error.actual = expected, actual
        return error


class CollationError(BatchedError, ValueError):
    """Refusal of a call: its arguments are not features with one row per item.

    No other caller gets this error, and the function was not called with this call.
    """


class QueueFull(BatchedError, RuntimeError):
    """Refusal of a call with `on_full="raise"`: `max_queue_size` items are waiting.

    No item of the call runs.
    """

    retry_after_s: float = 0.0
    """Time in which the present queue will have run, by the batches so far (s)."""


class QueueTimeout(BatchedError, TimeoutError):
    """End of a call that waited for `queue_timeout_ms` before any item of it ran.

    No item of the call will run.
    """

    retry_after_s: float = 0.0
    """Time in which the present queue will have run, by the batches so far (s)."""


class BatcherClosed(BatchedError, RuntimeError):
    """Refusal of a call after the shutdown of its batcher; `with fn:` opens the batcher again."""


class ServerGone(BatcherClosed):
    """End of a call of a connected function whose model process is not there.

    The process has ended, could not be started, or refused this client. A call that was sent may
    have run, and is never sent again. The next call connects again.
    """


class EndpointError(BatchedError, RuntimeError):
    """Failure of a prompt or a text: the service returned an error, an unusable answer, or nothing.

    Errors that may pass were retried.
    """

    request_id: str | None = None
    """The service's own id of the last request, also in the message."""
    status_code: int | None = None
    """HTTP status of the last answer, if it was an error."""
    is_service: bool = False
    """Whether the service is at fault, so that the same prompt may succeed later."""


class SourceError(BatchedError, ValueError):
    """Refusal of the source of an offline run.

    A row, a key or a column is bad or missing, a file cannot be read, or a file changed during the
    run. Committed rows are kept.
    """


class RunLocked(BatchedError, RuntimeError):
    """Refusal of a run whose progress file belongs to another run.

    A run also ends with this error if another run takes over its progress file. The ended run
    writes nothing more to that file.
    """


class RunMismatch(BatchedError, ValueError):
    """Refusal of a progress file that was written by other steps.

    The function, its parameters or its columns differ. The file was not changed.
    """


class RunStopped(BatchedError, RuntimeError):
    """Early end of a run: too many failures.

    More rows failed than `max_failed` allows, or several whole batches failed in a row. Committed
    rows are kept, and the next run continues with the other rows.
    """

    report: Any = None
    """The `offline.Report` of the run so far."""


class ResultError(BatchedError, ValueError):
    """Refusal of the destination of an offline run.

    The folder is missing, full or read-only, no run made the file that is there, or the format is
    unknown.
    """


class TimeLimitExceeded(BatchedError, RuntimeError):
    """End of a call of a step's function that took longer than `timeout_s`."""


class WorkerDied(BatchedError, RuntimeError):
    """End of the process that ran the function of a step: a crash, an exit or a kill."""


class RemoteError(BatchedError):
    """Error in another process, as plain data: its class may be unknown in this process."""

    def __init__(
        self, error: str, lines: str, is_service: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(error, lines, is_service, retry_after)
        self.error = error
        """Class and message, for instance `ValueError: bad row`."""
        self.lines = lines
        """Traceback in the other process, as text."""
        self.is_service = is_service
        """Whether a service is at fault, so that the same call may succeed later."""
        self.retry_after = retry_after
        """Time until the service accepts the next request, if it said so (s)."""

    def __str__(self) -> str:
        return self.error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error!r})"
