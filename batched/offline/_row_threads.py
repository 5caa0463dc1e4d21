"""Row threads: for code that runs row by row beside the batches.

They are daemons, unlike those of `concurrent.futures`: a row that waits for ever holds up neither
the end of a run nor that of the program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class RowThreads:
    """Threads that call what is submitted, which must not raise."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        self._tasks.put(lambda: function(*args))

    def close(self, wait: float) -> None:
        """Drops what has not begun; what runs may end in `wait` seconds."""
        self._closing = True
        for _ in self._threads:
            self._tasks.put(None)
        start = time.perf_counter()
        for thread in self._threads:
            thread.join(max(0.0, wait - (time.perf_counter() - start)))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closing:
            task()
            del task  # rows may be large, and the next wait long
