"""All batched functions of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .batched import AsyncBatched, Batched, functions


def live() -> list[Batched[Any, Any, ...] | AsyncBatched[Any, Any, ...]]:
    """Return every batched function of this process that exists now.

    A method is in the list once for each instance that has called it, bound to that instance, and
    not as its class has it. For example, an operator looks at all queues::

        for fn in batched.live():
            print(fn.__name__, fn.stats)
    """
    return [found for ref in functions.valuerefs() for found in _callable(ref())]


def _callable(function: Any) -> Iterator[Any]:
    if function is None:
        return
    if function._owner is not None or function._function.kind == "static":
        yield function
    for ref, _ in list(function._instances.values()):
        if (owner := ref()) is not None:
            is_class = function._function.kind == "class"
            yield function.__get__(None, owner) if is_class else function.__get__(owner)
