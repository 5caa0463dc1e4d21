"""What hand-off between threads costs without any library: every caller waits on a lock of its own,
and one thread answers them all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from traffic import Call, Function

Waiting = list[tuple[Any, threading.Lock]]


@contextmanager
def for_threads(function: Function, batch_size: int, *, callers: int) -> Iterator[Call]:
    """Calls must be a multiple of a full batch: this one never leaves with fewer."""
    full = min(batch_size, callers)
    mutex, ready = threading.Lock(), SimpleQueue[Waiting]()
    waiting: Waiting = []

    def call(item: Any) -> None:
        nonlocal waiting
        answered = threading.Lock()
        answered.acquire()
        with mutex:
            waiting.append((item, answered))
            if len(waiting) == full:
                ready.put(waiting)
                waiting = []
        answered.acquire()

    def work() -> None:
        while batch := ready.get():
            function([item for item, _ in batch])
            for _, answered in batch:
                answered.release()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield call
    finally:
        ready.put([])
        worker.join()
