"""Detection of out-of-memory errors, and release of memory before another attempt."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import TracebackType
from typing import Final

from .exceptions import CAUSE, CONTEXT, TRACEBACK

_RESUMABLE: Final = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
"""Flags of code with frames that may be suspended."""

_OF_TORCH: Final = "OutOfMemoryError"
"""Name of the error of torch on CUDA, HIP and XPU; its versions have only the name in common."""

_MESSAGES: Final = re.compile(
    # torch before 2.5, asynchronous errors, Apple's GPUs
    r"(CUDA|HIP|MPS|XPU)( error: | backend | )out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|RESOURCE_EXHAUSTED",  # jax
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out, so that a smaller batch might fit.

    The type of `error` decides or, if the type says too little, its message.
    """
    kind = type(error)  # `isinstance` would read `error.__class__`, which may be user code
    if issubclass(kind, MemoryError):  # numpy raises a subclass
        return True
    if any(each.__name__ == _OF_TORCH for each in kind.__mro__):
        return True
    return issubclass(kind, RuntimeError) and _MESSAGES.search(str(error)) is not None


def drop_locals(error: BaseException) -> None:
    """Clear the local variables of the frames below `error`, and so free their tensors.

    The traceback keeps all lines up to the first frame that might be resumed.
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
    """Return `traceback` with cleared frames, up to the first frame that might be resumed.

    `of_function`: the first frame is that of the batch function, which has ended. Before Python
    3.13, clearing the frame of a waiting coroutine would close the coroutine.
    """
    lines: list[TracebackType] = []
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_flags & _RESUMABLE and not (of_function and not lines):
            break
        with suppress(RuntimeError):  # the frame is still running
            frame.clear()
        lines.append(traceback)
        traceback = traceback.tb_next
    rest: TracebackType | None = None
    for line in reversed(lines):
        rest = TracebackType(rest, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return rest


def free_cache() -> None:
    """Release the memory cached by torch, so that the next attempt can have it in one piece."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
