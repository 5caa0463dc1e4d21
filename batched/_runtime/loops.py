"""Which event loop runs this code, and what becomes of it: asyncio's (uvloop's among them) or trio's, told apart here."""

from __future__ import annotations

import asyncio
import sys
from typing import Any


def current_loop() -> object:
    """The asyncio loop, or the token of the trio loop, that runs this code; None outside any."""
    loop = asyncio._get_running_loop()
    if loop is None and "trio" in sys.modules:
        try:
            return sys.modules["trio"].lowlevel.current_trio_token()
        except RuntimeError:
            return None
    return loop


def current_task() -> object:
    """The asyncio or trio task that runs this code; None outside any."""
    loop = current_loop()
    if loop is None or isinstance(loop, asyncio.AbstractEventLoop):
        return asyncio.current_task() if loop is not None else None
    return sys.modules["trio"].lowlevel.current_task()


def ends_task(error: BaseException, task: Any) -> bool:
    """Whether `error`, raised where `task` awaited something, was sent to end the task, and not raised by what it awaited."""
    if isinstance(error, GeneratorExit):
        return current_task() is not task  # closed from outside: its loop is gone
    if isinstance(error, asyncio.CancelledError) and isinstance(task, asyncio.Task):
        return task.cancelling() > 0  # type: ignore[attr-defined, no-any-return]  # a worker's has it on Python 3.10 too
    return "trio" in sys.modules and isinstance(error, sys.modules["trio"].Cancelled)


def is_over(loop: object) -> bool:
    """Whether nothing will run on `loop` any more, or nothing does at present."""
    if isinstance(loop, asyncio.AbstractEventLoop):
        return not loop.is_running()
    try:
        loop.run_sync_soon(lambda: None)  # type: ignore[attr-defined]  # a trio token
    except RuntimeError:
        return True
    return False
