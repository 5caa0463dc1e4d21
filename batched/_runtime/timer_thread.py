"""Calls back at a given moment: one thread for all batchers of the process, started when the first
of them needs it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from .shift import daemon_thread
from .wakers import log_failure

_Appointment = tuple[float, int, Callable[[], Callable[[], object] | None]]
"""When (s), a number that makes it unique, and what returns what to call then, if that still
exists.
"""


MANY: Final = 64
"""Appointments that are kept without a look whether anybody still wants them."""


class TimerThread:
    """Has methods called, from its own thread, when their time has come."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.renew()

    def renew(self) -> None:
        """Forgets everything; in a forked process the thread is gone."""
        self._starting = threading.RLock()
        self._appointments: queue.SimpleQueue[_Appointment]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Makes sure that it runs.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._starting:
            if self._thread is None:
                # not before: gevent replaces this class
                appointments: queue.SimpleQueue[_Appointment] = queue.SimpleQueue()
                thread = daemon_thread("timer", _run, appointments)
                thread.start()
                self._appointments, self._thread = appointments, thread

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        """Has `method`, whose object this does not keep alive, called at `when` on `perf_counter`
        (s). It must be quick.
        """
        self._appointments.put((when, next(self._numbers), weakref.WeakMethod(method)))

    def call_soon(self, act: Callable[[], object]) -> None:
        """Has `act`, which this keeps alive, called at once. It must be quick."""
        self._appointments.put((-math.inf, next(self._numbers), lambda: act))


def _run(appointments: queue.SimpleQueue[_Appointment]) -> None:
    pending: list[_Appointment] = []
    most = MANY
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
        # those of batchers that are gone are kept no longer than others need room
        if len(pending) > most:
            pending = [appointment for appointment in pending if appointment[2]() is not None]
            heapq.heapify(pending)
            most = max(MANY, 2 * len(pending))


def _call(ref: Callable[[], Callable[[], object] | None]) -> None:
    method = ref()
    if method is None:
        return
    try:
        method()
    except BaseException:
        log_failure("a call of the timer failed")


timer = TimerThread()
