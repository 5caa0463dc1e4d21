"""One batch function, many callers: calls of one item at a time run in full batches.

@batched.dynamically
def embed(texts: list[str]) -> list[Vector]: ...

embed("one text")                # from any thread
await embed.acall("one text")    # from any event loop
embed(["many", "texts"])
"""

# dynamically      decorates a function that takes a list; callers are threads      (_decorator.py)
# aio.dynamically  the same for functions that coroutines await                     (aio/)
# Stats            what fn.stats returns                                            (stats.py)
# errors           what calls raise besides the function's own exceptions           (errors.py)
#
# _core/     which items form the next batch, and when: pure, no clock
# _collate/  items to the argument of the function, and its output to results
# _runtime/  threads, event loops, and how callers wait
# _batcher.py, _decorator.py  functions and settings; what a decorated function can do

from . import aio, errors
from ._batched import AsyncBatched, Batched, BatchedMethod
from ._decorator import dynamically
from .errors import BatchedError, BatcherClosed, BatchFunctionError, BatchSizeMismatch
from .stats import Stats

__version__ = "0.1.0"
__all__ = [
    "AsyncBatched",
    "BatchFunctionError",
    "BatchSizeMismatch",
    "Batched",
    "BatchedError",
    "BatchedMethod",
    "BatcherClosed",
    "Stats",
    "__version__",
    "aio",
    "dynamically",
    "errors",
]
