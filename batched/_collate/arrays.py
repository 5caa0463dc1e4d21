"""Arrays of numpy and tensors of torch, for code that imports neither library.

If a library is not loaded, no object can be one of its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

Array = Any
"""A `numpy.ndarray` or a `torch.Tensor`."""


def find_imported(module: str, name: str) -> tuple[Any, ...]:
    """Return the class of that name in a tuple, or an empty tuple if there is none yet.

    The module may not be imported, or another thread may still be importing it. Either way the
    class has no instances.
    """
    found = getattr(sys.modules.get(module), name, None)
    return (found,) if found else ()


def is_array(value: Any) -> bool:
    """Return whether `value` is an array of numpy or a tensor of torch."""
    # as `find_imported`, without its calls
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    ndarray = getattr(sys.modules.get("numpy"), "ndarray", ())
    return isinstance(value, (tensor, ndarray))


def is_dense(array: Array) -> bool:
    """Return whether the rows of `array` are slices of it: it is neither sparse nor nested."""
    return not hasattr(array, "layout") or (
        array.layout is sys.modules["torch"].strided and not array.is_nested
    )


def copy_array(array: Array) -> Array:
    """Return a copy of `array` in memory of its own."""
    return array.clone() if hasattr(array, "clone") else array.copy()


def ready_events(arrays: Iterable[Array]) -> list[Any]:
    """Return the devices of the tensors on GPUs, each with an event.

    The event marks the end of all pending computations of this thread's current stream there.
    """
    events: dict[Any, Any] = {}
    for array in arrays:
        if getattr(array, "is_cuda", False) and array.device not in events:
            cuda = sys.modules["torch"].cuda
            events[array.device] = event = cuda.Event(blocking=True)
            event.record(cuda.current_stream(array.device))
    return list(events.items())


def synchronize(arrays: Iterable[Array]) -> None:
    """Wait until the current streams of this thread have computed `arrays`."""
    for _, event in ready_events(arrays):
        event.synchronize()
