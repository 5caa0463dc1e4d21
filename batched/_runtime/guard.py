"""Guard against waits that would never end.

A caller must not wait for a lock that its own thread holds, or for a batch that it is part of.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .._core.scheduler import Request
from .shift import Badge, Wait, daemon_thread, wait_for
from .timer_thread import timer


class Guard:
    """Owner of the lock of a runtime.

    Finalizers and signal handlers interrupt a thread anywhere, also while it holds the lock.
    """

    def __init__(self, badge: Badge) -> None:
        self.badge = badge  # identity for runs, which hold no reference to the runtime
        self._renew_lock()

    def _renew_lock(self) -> None:
        # never held while user code runs or callers are woken; reentrant, to know its owner
        self._lock: Any = threading.RLock()

    def _later(self, method: Callable[..., object], *args: Any) -> bool:
        """Return whether this thread holds the lock, and must change nothing now.

        If so, `method` is called after the lock is free.
        """
        if not self._lock._is_owned():
            return False
        self._soon(functools.partial(method, *args))
        return True

    def _soon(self, act: Callable[[], object]) -> None:
        """Call `act` a moment later, in a new thread: callbacks of futures may block."""
        timer.start()
        timer.call_soon(daemon_thread(f"{self.badge.name}-later", act).start)

    def wait_for(
        self, request: Request | None, *, room: bool = False, done: Callable[[], bool] | None = None
    ) -> Wait | None:
        """Note that this code is about to wait for `request`. Return None outside any batch.

        `request` None stands for all calls. With `room`, the wait is only for room in the queue.

        Raises:
            RuntimeError: the code would wait for itself, and so for ever.
        """
        if self._lock._is_owned():
            raise RuntimeError(
                f"{self.badge.name} is called by a finalizer or a signal handler that broke in on "
                "it, and would wait for itself"
            )
        return wait_for(self.badge, request, room=room, done=done)

    def waiting_for(
        self, request: Request | None, *, room: bool = False
    ) -> AbstractContextManager[None] | None:
        """Return `wait_for` as a context manager, or None if the code would wait for itself."""
        try:
            return self.wait_for(request, room=room) or nullcontext()
        except RuntimeError:
            return None

    @property
    def within(self) -> bool:
        """Whether this code would wait for itself if it waited for the end of all calls."""
        waiting = self.waiting_for(None)
        with waiting or nullcontext():
            return waiting is None
