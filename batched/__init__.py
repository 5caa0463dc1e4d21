"""One batch function, many callers: calls of one item at a time run in full batches.

@batched.dynamically
def embed(texts: list[str]) -> list[Vector]: ...

embed("one text")                # from any thread
await embed.acall("one text")    # from any event loop
embed(["many", "texts"])
"""

# dynamically                decorator of a function of a list; callers are threads
# (_function/decorator.py)
# continuously               decorator of a function that works in steps; Rows, Row, Stream
# (_function/continuous.py)
# inference.dynamically      decorator of a function of padded arrays or tensors
# (inference.py)
# aio.dynamically,
# aio.inference.dynamically  both decorators, for functions that coroutines await
# (aio/)
# Future, Feature, Features  type of fn.submit's result; types of the arguments of array functions
# (_runtime/wakers.py, _collate/features/parse.py, _function/inference.py)
# Stats, BatchRecord         type of fn.stats; type of the argument of observers
# (stats.py)
# live                       all batched functions of this process
# (_function/batched.py)
# metrics                    metrics of all of them, for Prometheus and OpenTelemetry
# (metrics.py)
# tracing                    a span for each batch, for OpenTelemetry
# (tracing.py)
# asgi, chat, embeddings,
# generation, offline,
# testing                    more parts; these and the last two load when they are first used
# errors                     exceptions of calls besides the function's own
# (errors.py)
#
# _function/   decorated functions: settings, and ways of calling
# _core/       rules for the items of the next batch, and for its time; pure, without a clock
# _collate/    items to the argument of the function, and its output to results
# _execution/  the calls of the function for one batch
# _runtime/    threads, event loops, and the waits of callers
# _operations/ counts, metrics and traces of all functions
# _commands/   the command `batched`, or python -m batched

from ._installation import __version__  # first: it detects files of another project

# isort: split
from importlib import import_module as _import
from typing import TYPE_CHECKING

from . import aio, errors, inference
from ._collate.features.parse import Feature
from ._connect.connected import Connected as connect  # noqa: N813  # called as a function
from ._function.batched import AsyncBatched, Batched, live
from ._function.continuous import AsyncContinuous, Continuous, continuously
from ._function.decorator import dynamically
from ._function.inference import AsyncBatchedInference, BatchedInference, Features
from ._function.method import BatchedMethod
from ._runtime.wakers import Future
from ._steps.rows import Row, Rows
from ._steps.stream import Stream
from .errors import (
    BatchedError,
    BatcherClosed,
    BatchFunctionError,
    BatchSizeMismatch,
    CollationError,
    QueueFull,
    QueueTimeout,
)
from .stats import BatchRecord, Stats

if TYPE_CHECKING:
    from . import asgi as asgi
    from . import metrics as metrics
    from . import testing as testing
    from . import tracing as tracing
else:
    _LATE = ("asgi", "chat", "embeddings", "generation", "metrics", "offline", "testing", "tracing")

    def __getattr__(name):
        if name in _LATE:
            return _import(f".{name}", __name__)
        near = name.startswith("batch") or "dynamic" in name
        hint = "; did you mean 'dynamically'?" if near else ""
        error = AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        if hint:
            error.name = name  # else Python would add a hint of its own
        raise error

    def __dir__():
        return [*globals(), *_LATE]


__all__ = [
    "AsyncBatched",
    "AsyncBatchedInference",
    "AsyncContinuous",
    "BatchFunctionError",
    "BatchRecord",
    "BatchSizeMismatch",
    "Batched",
    "BatchedError",
    "BatchedInference",
    "BatchedMethod",
    "BatcherClosed",
    "CollationError",
    "Continuous",
    "Feature",
    "Features",
    "Future",
    "QueueFull",
    "QueueTimeout",
    "Row",
    "Rows",
    "Stats",
    "Stream",
    "__version__",
    "aio",
    "connect",
    "continuously",
    "dynamically",
    "errors",
    "inference",
    "live",
    "metrics",
    "tracing",
]
