"""Which event loop runs this code, and what becomes of it: asyncio's (uvloop's among them) or
trio's, told apart here.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any

_modules = sys.modules


def current_loop() -> object:
    """The asyncio loop, or the token of the trio loop, that runs this code; None outside any."""
    loop = _get_running_loop()
    if "trio" not in _modules:
        return loop
    try:
        trio = _modules["trio"].lowlevel
        # in trio's guest mode an asyncio loop is running, too
        if trio.in_trio_run() if loop is None else trio.in_trio_task():
            return trio.current_trio_token()
    except AttributeError:  # somebody is just importing it
        pass
    return loop


def is_notebook() -> bool:
    """Whether a notebook's kernel runs this code: it has a loop, in the main thread, on which it
    runs one cell at a time.
    """
    get_shell = getattr(_modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    return (
        getattr(shell, "kernel", None) is not None
        and threading.current_thread() is threading.main_thread()
    )


def current_task() -> object:
    """The asyncio or trio task that runs this code; None outside any."""
    loop = current_loop()
    if loop is None or isinstance(loop, asyncio.AbstractEventLoop):
        return asyncio.current_task() if loop is not None else None
    return _modules["trio"].lowlevel.current_task()


def ends_task(error: BaseException, task: Any) -> bool:
    """Whether `error`, raised where `task` awaited something, was sent to end the task, and not
    raised by what it awaited.
    """
    kind = type(error)  # `isinstance` would ask it for its `__class__`
    if issubclass(kind, GeneratorExit):
        return current_task() is not task  # closed from outside: its loop is gone
    if issubclass(kind, asyncio.CancelledError) and isinstance(task, asyncio.Task):
        return task.cancelling() > 0
    return issubclass(kind, getattr(_modules.get("trio"), "Cancelled", ()))


def ends_current_task(error: BaseException) -> bool:
    """`ends_task` of the task that runs this code."""
    return ends_task(error, current_task())


def post(loop: Any, function: Callable[..., object], *args: Any) -> None:
    """Has `function` called on `loop`, from any thread.

    Raises:
        RuntimeError: the loop is closed.
    """
    if isinstance(loop, asyncio.AbstractEventLoop):
        loop.call_soon_threadsafe(function, *args)
    else:  # a trio token
        loop.run_sync_soon(function, *args)


def is_gone(loop: object) -> bool:
    """Whether `loop` is closed, so that nothing will run on it any more."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop.is_closed()
    try:
        post(loop, lambda: None)
    except RuntimeError:
        return True
    return False


def is_over(loop: object) -> bool:
    """Whether nothing runs on `loop`, at least at present."""
    return is_gone(loop) or (isinstance(loop, asyncio.AbstractEventLoop) and not loop.is_running())
