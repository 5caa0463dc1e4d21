"""Errors as text and as plain data, for people and for other processes.

An error from another process is plain data (`errors.RemoteError`). The process in which the error
happened tells service errors and memory errors apart.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final, NamedTuple

from .._execution.memory import is_out_of_memory
from ..errors import RemoteError
from .errors import is_service_error, retry_after

_PACKAGE: Final = str(Path(__file__).parent.parent)
MOST_FRAMES: Final = 100
"""Frames of a traceback that are kept, the outermost ones. The traceback of one exception object
that is raised for many rows grows with each row.
"""


class RemoteMemoryError(RemoteError, MemoryError):
    """Memory error of another process: a smaller batch might fit."""


class ErrorText(NamedTuple):
    """An error as people read it."""

    error: str
    """Class and message, as `ValueError: bad row`."""
    traceback: str
    """Lines of the traceback, from the user's function on."""


def error_text(error: BaseException) -> ErrorText:
    """Return the text of `error`, without the frames of this package above the user's."""
    if isinstance(error, RemoteError):
        return ErrorText(error.error, error.lines)
    name = type(error).__name__
    try:
        message = str(error)
    except Exception as failed:
        message = f"its message cannot be made: {type(failed).__name__}"
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        first = first.tb_next
    try:
        lines = "".join(traceback.format_exception(type(error), error, first, limit=MOST_FRAMES))
    except Exception:  # of the code of an exception class, that of a cause or a part
        lines = ""
    text = f"{name}: {message}" if message else name
    return ErrorText(_encodable(text), _encodable(lines))


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates escaped, since UTF-8 cannot have them."""
    return text.encode(errors="backslashreplace").decode()


def is_memory_error(error: BaseException) -> bool:
    """Return whether memory ran out. Never raise, unlike `is_out_of_memory`."""
    try:
        return is_out_of_memory(error)
    except Exception:  # of its `__str__`
        return False


def to_remote(error: BaseException, more: tuple[type[BaseException], ...] = ()) -> RemoteError:
    """Return `error` as plain data that any process can read. `more`: classes of service errors."""
    kind = RemoteMemoryError if is_memory_error(error) else RemoteError
    return kind(*error_text(error), is_service_error(error, more), retry_after(error))
