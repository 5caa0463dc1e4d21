"""Row threads: run user code row by row (`preprocess`, `postprocess`) while batches compute.

Row threads are daemons, unlike the threads of `concurrent.futures`: a row that blocks forever
delays neither the end of a run nor the end of the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Final

from ..._runtime.timer_thread import daemon_thread

ROW_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""Default number of row threads, as in `concurrent.futures`."""


class RowThreads:
    """Threads that call submitted functions, which must not raise."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks = SimpleQueue[Callable[[], object]]()
        self._closed = False
        self._threads = [daemon_thread(name, self._work) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Queue a call for the next free thread."""
        self._tasks.put(partial(function, *args))

    def close(self, deadline: float) -> None:
        """Drop queued calls. Calls that run may end until `deadline` (s, `perf_counter`)."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(int)  # so that no thread waits
        for thread in self._threads:
            thread.join(max(0.0, deadline - perf_counter()))

    def _work(self) -> None:
        while not self._closed:
            self._tasks.get()()
