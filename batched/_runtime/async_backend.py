"""Event loop that runs this code, and its state: asyncio (uvloop included) or trio."""

from __future__ import annotations

import asyncio
import sys
import threading
from asyncio import _get_running_loop
from collections.abc import Callable
from typing import Any

_modules = sys.modules


def current_loop() -> object:
    """Return the asyncio loop, or the token of the trio loop, that runs this code; None if none."""
    loop = _get_running_loop()
    if "trio" not in _modules:
        return loop
    try:
        trio = _modules["trio"].lowlevel
        # in trio's guest mode an asyncio loop is running, too
        if trio.in_trio_run() if loop is None else trio.in_trio_task():
            return trio.current_trio_token()
    except AttributeError:  # another thread is importing trio
        pass
    return loop


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    get_shell = getattr(_modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    return getattr(shell, "kernel", None) is not None


def is_cell() -> bool:
    """Return whether the kernel of a notebook runs this code in the main thread.

    The kernel has a loop there, on which it runs one cell at a time.
    """
    return is_notebook() and threading.current_thread() is threading.main_thread()


def current_task() -> object:
    """Return the asyncio or trio task that runs this code; None outside any task."""
    loop = current_loop()
    if isinstance(loop, asyncio.AbstractEventLoop):
        return asyncio.current_task(loop)
    try:
        return None if loop is None else _modules["trio"].lowlevel.current_task()
    except RuntimeError:  # trio itself runs, between its tasks
        return None


def ends_task(error: BaseException, task: Any) -> bool:
    """Return whether `error`, raised at an `await` of `task`, was sent to end the task.

    Otherwise the awaited object has raised it.
    """
    kind = type(error)  # `isinstance` would read `error.__class__`, which may be user code
    if issubclass(kind, GeneratorExit):
        return current_task() is not task  # closed from outside: the loop is gone
    if issubclass(kind, asyncio.CancelledError) and isinstance(task, asyncio.Task):
        return task.cancelling() > 0
    return issubclass(kind, getattr(_modules.get("trio"), "Cancelled", ()))


def ends_current_task(error: BaseException) -> bool:
    """Return `ends_task` for the task that runs this code."""
    return ends_task(error, current_task())


def post(loop: Any, function: Callable[..., object], *args: Any) -> None:
    """Call `function` on `loop`. Can be used from any thread.

    Raises:
        RuntimeError: the loop is closed.
    """
    if isinstance(loop, asyncio.AbstractEventLoop):
        loop.call_soon_threadsafe(function, *args)
    else:  # a trio token
        loop.run_sync_soon(function, *args)


def is_gone(loop: object) -> bool:
    """Return whether `loop` is closed, so that no code will run on it any more."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return loop.is_closed()
    try:
        post(loop, lambda: None)
    except RuntimeError:
        return True
    return False


def is_over(loop: object) -> bool:
    """Return whether no code runs on `loop`, at least at present."""
    return is_gone(loop) or (isinstance(loop, asyncio.AbstractEventLoop) and not loop.is_running())
