"""Running out of memory: how it is told from other failures, and what makes room for another
attempt.
"""

from __future__ import annotations

import re
import sys
from typing import Final

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
    if isinstance(error, MemoryError):  # numpy's is one
        return True
    if any(kind.__name__ in _TYPES for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def drop_frames(error: BaseException) -> None:
    """Lets go of the frames below `error`, and of the tensors in them."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        pending += [one.__cause__, one.__context__]


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
