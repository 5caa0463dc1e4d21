"""Errors of a batch function as text and as plain data.

An error that a process reports is plain data (`errors.RemoteError`), and was told apart where it
happened (`_service_errors.py`).
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final, NamedTuple

from .._execution.memory import is_out_of_memory
from .._service_errors import is_service_error, retry_after
from ..errors import RemoteError

_PACKAGE: Final = str(Path(__file__).parent.parent)


class RemoteMemoryError(RemoteError, MemoryError):
    """Of these, one that means that a smaller batch might have fitted."""


class ErrorText(NamedTuple):
    """An error as people read it."""

    error: str
    """Class and message, as `ValueError: bad row`."""
    traceback: str
    """Lines of the traceback from the user's function on."""


def describe(error: BaseException) -> ErrorText:
    """Text of `error`, without frames of this package above the user's."""
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
        lines = "".join(traceback.format_exception(type(error), error, first))
    except Exception:  # of a cause or a part, whose class may have code of its own
        lines = ""
    text = f"{name}: {message}" if message else name
    return ErrorText(_storable(text), _storable(lines))


def _storable(text: str) -> str:
    """`text` as UTF-8 can have it: messages may quote lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def to_remote(error: BaseException, more: tuple[type[BaseException], ...] = ()) -> RemoteError:
    """Plain data of `error`, which any process can read."""
    text = describe(error)
    try:
        kind = RemoteMemoryError if is_out_of_memory(error) else RemoteError
    except Exception:  # of its `__str__`
        kind = RemoteError
    return kind(*text, is_service_error(error, more), retry_after(error))
