"""Daemon threads that serve many callers, among them the timer: one for the process."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import Context

from .wakers import log_failure

_Entry = tuple[float, int, Callable[[], Callable[[], object] | None]]
"""Moment (s), a unique number, and a function that returns the method to call, or None if it is
gone.
"""


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
        self.renew()

    def renew(self) -> None:
        """Discard all state. In a forked process the thread is gone."""
        self._starting = threading.RLock()
        self._entries: queue.SimpleQueue[_Entry]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it runs.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._starting:
            if self._thread is None:
                # not at import: gevent may replace this class later
                entries: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
                thread = daemon_thread("timer", _run, entries)
                thread.start()
                self._entries, self._thread = entries, thread

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        """Call `method` at `when` on `perf_counter` (s).

        The method must be quick. Its object is not kept alive.
        """
        self._entries.put((when, next(self._numbers), weakref.WeakMethod(method)))

    def call_soon(self, act: Callable[[], object]) -> None:
        """Call `act` at once, from the thread. It must be quick, and is kept alive until then."""
        self._entries.put((-math.inf, next(self._numbers), lambda: act))


def _run(entries: queue.SimpleQueue[_Entry]) -> None:
    due: list[_Entry] = []
    while True:
        now = time.perf_counter()
        while due and due[0][0] <= now:
            _call(heapq.heappop(due)[2])
        seconds = min(due[0][0] - now, threading.TIMEOUT_MAX) if due else None
        try:
            heapq.heappush(due, entries.get(timeout=seconds))
        except queue.Empty:
            continue


def _call(ref: Callable[[], Callable[[], object] | None]) -> None:
    try:
        if (method := ref()) is not None:
            method()
    except BaseException:
        log_failure("a call of the timer failed")


timer = TimerThread()
