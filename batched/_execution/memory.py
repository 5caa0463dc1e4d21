"""Running out of memory: how it is told from other failures, and what makes room for another
attempt.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import TracebackType
from typing import Final

from .._core.exceptions import CAUSE, CONTEXT, TRACEBACK

_RESUMABLE: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
"""Flags of code whose frame may be suspended."""

_TYPES: Final = {"OutOfMemoryError"}
"""What torch raises on CUDA, HIP and XPU; the name is all that its versions have in common."""

_MESSAGES: Final = re.compile(
    # torch before 2.5, asynchronous errors, Apple's GPUs
    r"(CUDA|HIP|MPS|XPU)( error: | backend | )out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|RESOURCE_EXHAUSTED",  # jax
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch might have fitted: by the type of `error` or, where that says little,
    by its message.
    """
    kind = type(error)  # `isinstance` would ask it for its `__class__`
    if issubclass(kind, MemoryError):  # numpy's is one
        return True
    if any(each.__name__ in _TYPES for each in kind.__mro__):
        return True
    return issubclass(kind, RuntimeError) and _MESSAGES.search(str(error)) is not None


def drop_locals(error: BaseException) -> None:
    """Lets go of the locals of the frames below `error`, and of the tensors in them; its traceback
    still tells of all lines up to the first that might be gone on with.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            lines = _without_locals(TRACEBACK.__get__(one), of_function=one is error)
            TRACEBACK.__set__(one, lines)
            pending += [CAUSE.__get__(one), CONTEXT.__get__(one)]


def _without_locals(traceback: TracebackType | None, of_function: bool) -> TracebackType | None:
    """`traceback` with empty frames. `of_function`: the first is that of the batch function, which
    is over; before Python 3.13 clearing that of a coroutine that waits would close it.
    """
    lines: list[TracebackType] = []
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_flags & _RESUMABLE and not (of_function and not lines):
            break
        with suppress(RuntimeError):  # somebody is running it
            frame.clear()
        lines.append(traceback)
        traceback = traceback.tb_next
    rest: TracebackType | None = None
    for line in reversed(lines):
        rest = TracebackType(rest, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return rest


def free_cache() -> None:
    """Gives memory that torch keeps for later back to where the next attempt can have it as one
    piece.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
