"""Keeps callers of a runtime from waiting for themselves: for a lock that their own thread has, or
for a batch that they are part of.
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
    """Owns the lock of a runtime. Finalizers and signal handlers break in anywhere, also on a
    thread that has it.
    """

    def __init__(self, badge: Badge) -> None:
        self.badge = badge  # what runs carry instead of a reference to this
        self._renew_lock()

    def _renew_lock(self) -> None:
        # never held while user code is called or callers are woken; reentrant, to know who has it
        self._lock: Any = threading.RLock()

    def _later(self, method: Callable[..., object], *args: Any) -> bool:
        """Whether this thread has the lock, and is to change nothing now; then `method` is called
        when it has not.
        """
        if not self._lock._is_owned():
            return False
        self._soon(functools.partial(method, *args))
        return True

    def _soon(self, act: Callable[[], object]) -> None:
        """Has `act` called a moment later, in a thread of its own: callbacks of futures may
        block.
        """
        timer.start()
        timer.call_soon(daemon_thread(f"{self.badge.name}-later", act).start)

    def wait_for(
        self, request: Request | None, *, room: bool = False, done: Callable[[], bool] | None = None
    ) -> Wait | None:
        """Notes that this code is about to wait for `request`, or for the end of all, or only for
        `room`; None outside any batch.

        Raises:
            RuntimeError: it would wait for itself, and so for ever.
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
        """As `wait_for`, for a `with` statement around the wait; None if it would wait for
        itself.
        """
        try:
            return self.wait_for(request, room=room) or nullcontext()
        except RuntimeError:
            return None

    @property
    def within(self) -> bool:
        """Whether waiting for the end of all calls would be waiting for itself here."""
        waiting = self.waiting_for(None)
        with waiting or nullcontext():
            return waiting is None
