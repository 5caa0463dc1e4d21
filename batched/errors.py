"""Errors that a call can raise besides those of the batch function itself.

BatchedError
├── BatchFunctionError(RuntimeError)   the function ended in a way that no caller could be told as
│   │                                  it was
│   └── BatchSizeMismatch              it returned more or fewer results than it was given items
├── CollationError(ValueError)         features that make no batch
├── QueueFull(RuntimeError)            no room in the queue, and the call was not to wait for it
├── QueueTimeout(TimeoutError)         the call waited too long, and nothing of it was run
├── BatcherClosed(RuntimeError)        the batcher was shut down before it could answer
├── ChatError(RuntimeError)            a chat service has no answer to a prompt, or no usable one
├── SourceError(ValueError)            rows, keys or columns that `batched.offline` cannot read, or
│                                      that changed while it did
├── RunLocked(RuntimeError)            another run has the progress file
├── RunMismatch(ValueError)            the progress file is of steps that meant something else
├── RunStopped(RuntimeError)           too many rows or batches failed for a run to go on
├── ResultError(ValueError)            the result of an offline run cannot be written there
├── TimeLimitExceeded(RuntimeError)    offline: a call of the function took longer than `timeout_s`
├── WorkerDied(RuntimeError)           offline: the process that ran the function ended
└── RemoteError                        offline: any error in another process, as text
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BatchFunctionError",
    "BatchSizeMismatch",
    "BatchedError",
    "BatcherClosed",
    "ChatError",
    "CollationError",
    "QueueFull",
    "QueueTimeout",
    "RemoteError",
    "ResultError",
    "RunLocked",
    "RunMismatch",
    "RunStopped",
    "SourceError",
    "TimeLimitExceeded",
    "WorkerDied",
]


class BatchedError(Exception):
    """Any error that this library raises on its own account."""


class BatchFunctionError(BatchedError, RuntimeError):
    """The batch function broke its contract: it returned something that holds no results, or raised
    what is no `Exception`.

    `SystemExit`, `KeyboardInterrupt`, `CancelledError`, `GeneratorExit`, `StopIteration` and
    `StopAsyncIteration` mean something else to the code that waits, so callers get this error with
    the original as its `__cause__`.
    """


class BatchSizeMismatch(BatchFunctionError):
    """The batch function returned another number of results than it was given items; every caller
    of that batch gets this.
    """

    expected: int
    """Items the function was given."""
    actual: int
    """Results it returned."""

    @classmethod
    def between(cls, name: str, expected: int, actual: int, where: str = "") -> BatchSizeMismatch:
        place = (
            f" in {where!r} of its output, of which every array needs as many (a list or tuple "
            "holds arrays, not rows)"
            if where
            else ""
        )
        error = cls(
            f"{name} was given {expected} items and returned {actual} results{place}; it "
            "must return one per item, in order"
        )
        error.expected, error.actual = expected, actual
        return error


class CollationError(BatchedError, ValueError):
    """What a caller passed are no features with one row per item; that caller alone gets this, and
    nothing was run for it.
    """


class QueueFull(BatchedError, RuntimeError):
    """`max_queue_size` items were waiting, and `on_full="raise"` refuses what comes then; nothing
    was run for this call.
    """


class QueueTimeout(BatchedError, TimeoutError):
    """The call had waited for `queue_timeout_ms`, and nothing of it had begun to run; nothing will
    be.
    """


class BatcherClosed(BatchedError, RuntimeError):
    """The batcher was shut down, so it takes no more calls; entering `with fn:` opens it again."""


class ChatError(BatchedError, RuntimeError):
    """A chat service has answered a prompt with an error, with what is no result, or not at all; it
    was asked again if that is worth it.
    """

    request_id: str | None = None
    """Of the last request, by which the service knows it; it is in the message, too."""
    status_code: int | None = None
    """HTTP status of the last answer, if that was an error."""
    is_service: bool = False
    """Whether the service is at fault, so that the same prompt may be answered later."""


class SourceError(BatchedError, ValueError):
    """The source of an offline run is not as it must be: a row, a key or a column is bad or
    missing, a file cannot be read, or one changed during the run. What was committed before is
    kept.
    """


class RunLocked(BatchedError, RuntimeError):
    """Another run has the progress file, or took it over from this one; this run writes nothing to
    it.
    """


class RunMismatch(BatchedError, ValueError):
    """The progress file was written by steps that meant something else: another function, other
    parameters, other columns. Nothing of it was changed.
    """


class RunStopped(BatchedError, RuntimeError):
    """The run ended early: more rows failed than `max_failed` allows, or one batch after another
    failed whole. What was committed is kept, and running again goes on from there.
    """

    report: Any = None
    """The `offline.Report` of the run up to then."""


class ResultError(BatchedError, ValueError):
    """The destination of an offline run is none: its folder is missing, full or read-only, a file
    that no run made is there, or the format is unknown.
    """


class TimeLimitExceeded(BatchedError, RuntimeError):
    """A call of the function of a step took longer than `timeout_s`, and was ended."""


class WorkerDied(BatchedError, RuntimeError):
    """The process that ran the function of a step ended: it crashed, exited or was killed."""


class RemoteError(BatchedError):
    """An error that happened in another process, as plain data: the class that it had there may be
    none here.
    """

    def __init__(
        self, error: str, lines: str, is_service: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(error, lines, is_service, retry_after)
        self.error = error
        """Its class and its message, as `ValueError: bad row`."""
        self.lines = lines
        """Its traceback there, as text."""
        self.is_service = is_service
        """Whether a service is at fault, so that the same call may be answered later."""
        self.retry_after = retry_after
        """Time after which that service is to be asked again (s), if it said so."""

    def __str__(self) -> str:
        return self.error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.error!r})"
