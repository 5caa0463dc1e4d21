"""Counts of all batched functions of this process, and of all processes of a service.

The processes of a service share the folder that `PROMETHEUS_MULTIPROC_DIR` names. Each process has
one file there, which a thread writes again while the counts or the load change. So any process of
the service can answer a scrape for all of them, and the counts of a process outlive it.
"""

from __future__ import annotations

import json
import os
import threading
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
"""Shortest time from one look at the counts to the next (s)."""
MOST_SHARE: Final = 0.05
"""Largest share of the time that the thread spends at work: counting 100,000 instances is slow."""
GAUGES: Final = ("waiting", "blocked", "running", "limit")
"""Names of numbers that end with their process."""


def of_this_process() -> dict[str, Counts]:
    """Return the counts since the start of this process, and its present load, by function."""
    found = recorder.totals()
    for runtime in alive():
        into = found.setdefault(runtime.name, Counter())
        load = *runtime.load(), runtime.policy.max_queue_size or 0
        for name, value in zip(GAUGES, load, strict=True):
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
    """Begin to write the counts of this process, if the environment names a folder.

    Raises:
        FileNotFoundError: the folder does not exist.
    """
    folder = os.environ.get(FOLDER)
    if not folder or (isinstance(recorder.sink, CountsFile) and recorder.sink.pid == os.getpid()):
        return
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"{FOLDER} must name an empty folder that exists before the service starts, got "
            f"{folder!r}"
        )
    recorder.sink = CountsFile(folder)


class CountsFile(recorder.Sink):
    """File with the counts of this process."""

    def __init__(self, folder: str) -> None:
        self.pid = os.getpid()
        # a process id may be used again
        self.path = Path(folder, f"batched_{self.pid}_{uuid.uuid4().hex[:8]}.json")
        self._lock = threading.Lock()  # so that no older counts replace the last ones
        self._written = ""
        self._fails = False  # whether the last attempt to write has failed
        daemon_thread("counts", self._run).start()

    def after_fork(self) -> None:
        recorder.sink = None  # this file, and its lock, belong to the parent
        try:
            share_counts()
        except Exception:  # the calls of the forked process go on
            log_failure("the counts of a forked process are in no file")

    def close(self) -> None:
        with self._lock:
            self._write()

    def _run(self) -> None:
        """Look at the counts again and again. Target of a thread."""
        while True:
            begin = time.perf_counter()
            with self._lock:
                self._write()
            time.sleep(max(PAUSE, (time.perf_counter() - begin) / MOST_SHARE))

    def _write(self) -> None:
        """Write the file if the counts have changed, under the lock."""
        values = {
            function: [[*key, value] for key, value in counts.items()]
            for function, counts in of_this_process().items()
        }
        text = json.dumps(values)
        if text == self._written:
            return
        new = self.path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        try:
            new.write_text(text)
            new.replace(self.path)
            self._written, self._fails = text, False
        except OSError:
            if not self._fails:
                folder = self.path.parent
                log_failure("the counts of this process could not be written to %s", folder)
            self._fails = True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
