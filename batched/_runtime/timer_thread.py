"""Daemon threads that serve many callers, among them the timer: one for the process."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

from .wakers import log_failure


def daemon_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Return a thread, not started yet, that serves many callers.

    It runs in an empty context. Free-threaded builds would have it inherit the context of the
    thread that starts it (`thread_inherit_context`).
    """
    return threading.Thread(
        target=Context().run, args=(target, *args), name=f"batched-{name}", daemon=True
    )


class TimerThread:
    """Thread that calls methods at given moments. It starts when the first batcher needs it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # queue for the thread, once it runs, of moments (s), unique numbers, and weak references to
        # the methods to call
        self._entries: Any = None

    def renew(self) -> None:
        """Discard all state. In a forked process the thread is gone."""
        self._entries = None

    def start(self) -> None:
        """Start the thread unless it runs.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self._entries is None:
            # not at import: gevent may replace this class later
            entries = queue.SimpleQueue[Any]()
            daemon_thread("timer", _run, entries).start()
            self._entries = entries

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        """Call `method` at `when` on `perf_counter` (s).

        The method must be quick. Its object is not kept alive.
        """
        self._entries.put((when, next(self._numbers), weakref.WeakMethod(method)))


def _run(entries: queue.SimpleQueue[Any]) -> None:
    due: list[Any] = []
    while True:
        seconds = min(due[0][0] - time.perf_counter(), threading.TIMEOUT_MAX) if due else None
        if seconds is not None and seconds <= 0:
            _call(heapq.heappop(due)[2]())
            continue
        with suppress(queue.Empty):
            heapq.heappush(due, entries.get(timeout=seconds))


def _call(method: Callable[[], object] | None) -> None:
    try:
        if method is not None:
            method()
    except BaseException:
        log_failure("a call of the timer failed")


timer = TimerThread()
