"""Timer of all batchers of a process: one thread, started when the first batcher needs it."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable

from .shift import daemon_thread
from .wakers import log_failure

_Appointment = tuple[float, int, Callable[[], Callable[[], object] | None]]
"""Moment (s), a unique number, and a function that returns the method to call, or None if it is
gone.
"""


class TimerThread:
    """Thread that calls methods at given moments."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.renew()

    def renew(self) -> None:
        """Discard all state. In a forked process the thread is gone."""
        self._starting = threading.RLock()
        self._appointments: queue.SimpleQueue[_Appointment]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it runs.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._starting:
            if self._thread is None:
                # not at import: gevent may replace this class later
                appointments: queue.SimpleQueue[_Appointment] = queue.SimpleQueue()
                thread = daemon_thread("timer", _run, appointments)
                thread.start()
                self._appointments, self._thread = appointments, thread

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        """Call `method` at `when` on `perf_counter` (s).

        The method must be quick. Its object is not kept alive.
        """
        self._appointments.put((when, next(self._numbers), weakref.WeakMethod(method)))

    def call_soon(self, act: Callable[[], object]) -> None:
        """Call `act` at once, from the thread. It must be quick, and is kept alive until then."""
        self._appointments.put((-math.inf, next(self._numbers), lambda: act))


def _run(appointments: queue.SimpleQueue[_Appointment]) -> None:
    pending: list[_Appointment] = []
    while True:
        now = time.perf_counter()
        while pending and pending[0][0] <= now:
            _call(heapq.heappop(pending)[2])
        seconds: float | None = None
        if pending:
            seconds = min(pending[0][0] - now, threading.TIMEOUT_MAX)
        try:
            heapq.heappush(pending, appointments.get(timeout=seconds))
        except queue.Empty:
            continue


def _call(ref: Callable[[], Callable[[], object] | None]) -> None:
    method = ref()
    if method is None:
        return
    try:
        method()
    except BaseException:
        log_failure("a call of the timer failed")


timer = TimerThread()
