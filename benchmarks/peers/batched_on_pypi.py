"""`batched` 0.1.5 on PyPI: another project with the name of this one, imported only in its own
environment.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from traffic import AsyncCall, Call, Function

batched: Any = importlib.import_module("batched")
if not batched.__file__.startswith(sys.prefix):
    raise ImportError(f"{batched.__file__} is another `batched` than this environment's own")


@contextmanager
def for_threads(function: Function, batch_size: int) -> Iterator[Call]:
    fn = batched.dynamically(function, batch_size=batch_size)
    try:
        yield fn
    finally:
        fn.shutdown()


@asynccontextmanager
async def for_coroutines(function: Function, batch_size: int) -> AsyncIterator[AsyncCall]:
    """Yield the batched function; its background task ends with the loop."""
    yield batched.aio.dynamically(function, batch_size=batch_size)
