"""Detection of out-of-memory errors, and release of memory before another attempt."""

from __future__ import annotations

import re
import sys
import traceback
from contextlib import suppress
from typing import Final

from .exceptions import TRACEBACK

_MESSAGES: Final = re.compile(
    # torch before 2.5, asynchronous errors, Apple's GPUs
    r"(CUDA|HIP|MPS|XPU)( error: | backend | )out of memory"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|RESOURCE_EXHAUSTED"  # jax
    r"|CUDA failure 2: out of memory|Failed to allocate memory for requested buffer",  # ONNX
    re.IGNORECASE,
)

_RESUMABLE: Final = 0x2A0
"""Flags of generators, coroutines and asynchronous generators (`inspect.CO_GENERATOR`, ...)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out, so that a smaller batch might fit.

    The type of `error` decides or, if the type says too little, its message.
    """
    kind = type(error)  # `isinstance` would read `error.__class__`, which may be user code
    if issubclass(kind, MemoryError):  # numpy raises a subclass
        return True
    # the errors of torch on CUDA, HIP and XPU have only the name in common
    if any(each.__name__ == "OutOfMemoryError" for each in kind.__mro__):
        return True
    # the errors of ONNX Runtime have only their module in common
    is_runtime = issubclass(kind, RuntimeError) or kind.__module__.startswith("onnxruntime")
    return is_runtime and _MESSAGES.search(str(error)) is not None


def release_memory(error: BaseException) -> None:
    """Clear the local variables of the frames of `error`, and free memory cached by torch.

    The first frame is that of the batch function, which has ended.
    """
    frames = [frame for frame, _ in traceback.walk_tb(TRACEBACK.__get__(error))]
    for frame in frames:
        # before Python 3.13, `clear` closes a suspended coroutine, perhaps of a task
        if frame is frames[0] or not frame.f_code.co_flags & _RESUMABLE:
            with suppress(RuntimeError):  # the frame is running
                frame.clear()
    with suppress(BaseException):  # a user's module may be named torch
        torch = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        if torch.backends.mps.is_available():
            torch.mps.empty_cache()
