"""Row threads: run user code row by row (`preprocess`, `postprocess`) while batches compute.

Row threads are daemons, unlike the threads of `concurrent.futures`: a row that blocks forever
delays neither the end of a run nor the end of the program.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Final

ROW_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
"""Default number of row threads, as in `concurrent.futures`."""


class RowThreads:
    """Threads that call submitted functions, which must not raise."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Queue a call for the next free thread."""
        self._tasks.put(partial(function, *args))

    def close(self, deadline: float) -> None:
        """Drop queued calls. Calls that run may end until `deadline` (s, `perf_counter`)."""
        with suppress(Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self._threads:
            self._tasks.put(None)
        join(self._threads, deadline)

    def _work(self) -> None:
        for task in iter(self._tasks.get, None):
            task()
            del task  # rows may be large, and the next wait long


def join(threads: Sequence[threading.Thread], deadline: float) -> None:
    """Wait until all of `threads` that have started end, or until `deadline` (s)."""
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - perf_counter()))
