"""One batch function, many callers: calls of one item at a time run in full batches.

@batched.dynamically
def embed(texts: list[str]) -> list[Vector]: ...

embed("one text")                # from any thread
await embed.acall("one text")    # from any event loop
embed(["many", "texts"])
"""

# dynamically                decorates a function that takes a list; callers are threads
# (_function/decorator.py)
# inference.dynamically      the same for functions that take padded arrays or tensors
# (inference.py)
# aio.dynamically,
# aio.inference.dynamically  the same two for functions that coroutines await
# (aio/)
# Future, Feature, Features  what fn.submit returns, and what calls of functions of arrays pass
# (_runtime/wakers.py, _collate/features/parse.py, _function/inference.py)
# Stats, BatchRecord         what fn.stats returns, and what an observer of batches gets
# (stats.py)
# metrics                    such observers for Prometheus and OpenTelemetry
# (metrics.py)
# asgi                       middleware for web servers, which needs anyio; not imported here
# (asgi.py)
# errors                     what calls raise besides the function's own exceptions
# (errors.py)
#
# _function/   decorated functions: settings, calls, and how functions are made
# _core/       which items form the next batch, and when: pure, no clock
# _collate/    items to the argument of the function, and its output to results
# _execution/  the calls of the function that one batch takes
# _runtime/    threads, event loops, and how callers wait
# _commands/   the command `batched`, or python -m batched

from ._installation import __version__  # first, before what another project may hide

# isort: split
from . import aio, errors, inference, metrics
from ._collate.features.parse import Feature
from ._function.batched import AsyncBatched, Batched
from ._function.decorator import dynamically
from ._function.inference import AsyncBatchedInference, BatchedInference, Features
from ._function.method import BatchedMethod
from ._runtime.wakers import Future
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

__all__ = [
    "AsyncBatched",
    "AsyncBatchedInference",
    "BatchFunctionError",
    "BatchRecord",
    "BatchSizeMismatch",
    "Batched",
    "BatchedError",
    "BatchedInference",
    "BatchedMethod",
    "BatcherClosed",
    "CollationError",
    "Feature",
    "Features",
    "Future",
    "QueueFull",
    "QueueTimeout",
    "Stats",
    "__version__",
    "aio",
    "dynamically",
    "errors",
    "inference",
    "metrics",
]
