"""Counts of all batched functions of this process, and of all processes of a service.

The processes of a service share the folder that `PROMETHEUS_MULTIPROC_DIR` names. Each process has
one file there, which a thread writes soon after each change. So any process of the service can
answer a scrape for all of them, and the counts of a process outlive it. An idle process writes
nothing.
"""

from __future__ import annotations

import json
import os
import queue
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Final

from .._runtime import recorder
from .._runtime.call_queue import alive
from .._runtime.recorder import Counts
from .._runtime.timer_thread import daemon_thread
from .._runtime.wakers import log_failure

FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder, in which prometheus-client keeps its own files, too."""
PAUSE: Final = 0.1
"""Shortest time between two writings (s)."""
GAUGES: Final = ("waiting", "blocked", "running")
"""Names of numbers that end with their process."""


def of_this_process() -> dict[str, Counts]:
    """Return the counts since the start of this process, and its present load, by function."""
    found = recorder.totals()
    for runtime in alive():
        into = found.setdefault(runtime.name, Counter())
        for name, value in zip(GAUGES, runtime.load(), strict=True):
            into[name, ""] += value
    return found


def of_all_processes() -> dict[str, Counts]:
    """Return the same summed over all processes of the service, if they share a folder."""
    sums = of_this_process()
    folder = os.environ.get(FOLDER)
    for path in Path(folder).glob("batched_*.json") if folder else ():
        if isinstance(recorder.sink, CountsFile) and path == recorder.sink.path:
            continue
        has_ended = not _is_alive(int(path.name.split("_")[1]))
        for function, counts in json.loads(path.read_text()).items():
            into = sums.setdefault(function, Counter())
            for name, label, value in counts:
                if not (has_ended and name in GAUGES):
                    into[name, label] += value
    return sums


def share_counts() -> None:
    """Begin to write the counts of this process, if the environment names a folder."""
    folder = os.environ.get(FOLDER)
    if folder and not (isinstance(recorder.sink, CountsFile) and recorder.sink.pid == os.getpid()):
        recorder.sink = CountsFile(folder)


class CountsFile(recorder.Sink):
    """File with the counts of this process."""

    def __init__(self, folder: str) -> None:
        self.pid = os.getpid()
        # a process id may be used again
        self.path = Path(folder, f"batched_{self.pid}_{uuid.uuid4().hex[:8]}.json")
        self._changes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._noted = False  # whether a change waits to be written
        daemon_thread("counts", self._run).start()
        self.changed()

    def changed(self) -> None:
        if not self._noted:
            self._noted = True
            self._changes.put(True)

    def after_fork(self) -> None:
        share_counts()

    def close(self) -> None:
        self._write()

    def _run(self) -> None:
        """Write the file after each change. Target of a thread."""
        while self._changes.get():
            self._noted = False
            self._write()
            time.sleep(PAUSE)

    def _write(self) -> None:
        values = {
            function: [[*key, value] for key, value in counts.items()]
            for function, counts in of_this_process().items()
        }
        new = self.path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        try:
            new.write_text(json.dumps(values))
            new.replace(self.path)
        except OSError:
            log_failure("the counts of this process could not be written to %s", self.path.parent)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
