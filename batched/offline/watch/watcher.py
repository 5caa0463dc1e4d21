"""Views of a run while it goes on.

1. The coordinator updates the watcher a few times a second. A view that fails is logged and
   dropped, and the run goes on.
2. Every run writes `<result>.status`, for `batched status`. Lines go to stderr.
3. The rate of a step counts the rows that it has computed since the end of its first batch. Rows
   that were committed before are in no rate, nor is the time of building a model.
4. The time left of a step is its remaining rows at its own rate. No step ends before the step that
   it reads from; so the run takes as long as its slowest step.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ..._runtime.async_backend import is_notebook
from ..._runtime.wakers import log_failure
from ..report import Pace, Snapshot, State, StepCounts
from .lines import Lines

PERIOD: Final = 1.0
"""Time between two versions of the status file (s)."""

View = Callable[[State, Snapshot, Sequence[Pace]], None]
"""Function that shows a run; it may raise."""


def watcher(watch: bool | Callable[[Snapshot], None], progress_path: Path, output: str) -> Watcher:
    """Return the watcher of a run: the status file and, as `watch` says, lines or a function."""
    views: list[View] = [StatusFile(progress_path, output)]
    if callable(watch):
        views.append(lambda _state, snapshot, _paces: watch(snapshot))
    elif watch and sys.stderr:
        views.append(Lines(output, rewrites=is_notebook() or sys.stderr.isatty()))
    return Watcher(views)


class Watcher:
    """All views of a run."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = list(views)
        self._meters: list[Meter] = []

    def update(self, snapshot: Snapshot, state: State = "running") -> None:
        """Show the run as it is now. Never raise."""
        paces = self._paces(snapshot)
        for view in list(self._views):
            try:
                view(state, snapshot, paces)
            except Exception:
                self._views.remove(view)
                log_failure("a view of an offline run failed, and is shown no more")

    def _paces(self, snapshot: Snapshot) -> list[Pace]:
        self._meters = self._meters or [Meter() for _ in snapshot.steps]
        paces: list[Pace] = []
        done, slowest = snapshot.read, 0.0
        for step, meter in zip(snapshot.steps, self._meters, strict=True):
            meter.add(snapshot.seconds, step)
            done -= step.waiting  # a row that waits in a step waits for all later steps, too
            rate, left = meter.rate, None
            if snapshot.total is not None and rate:
                left = slowest = max(slowest, (snapshot.total - done) / rate)
            paces.append(Pace(step, done, rate, left))
        return paces


class Meter:
    """Rate of one step."""

    def __init__(self) -> None:
        self._batches = 0
        self._first: tuple[float, int] | None = None  # end of the first batch (s), rows by then
        self.rate: float | None = None
        """Rows a second; None before the end of a second batch."""

    def add(self, now: float, step: StepCounts) -> None:
        """Note the counts of the step `now` seconds after the run began."""
        rows = step.ok + step.failed + step.filtered
        if step.batches == self._batches:
            return
        self._batches = step.batches
        if self._first is None:
            self._first = now, rows
        elif now > self._first[0]:
            self.rate = (rows - self._first[1]) / (now - self._first[0])


class StatusFile:
    """View that is a file: whole at every moment, at most one version a second."""

    def __init__(self, progress: Path, output: str) -> None:
        self._path = status_path(progress)
        self._written = -math.inf
        self._known = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": _now(),
            "result": output,
            "progress": str(progress),
        }

    def __call__(self, state: State, snapshot: Snapshot, paces: Sequence[Pace]) -> None:
        """Write a new version of the file, if it is time for one."""
        now = time.perf_counter()
        if state == "running" and now - self._written < PERIOD:
            return
        self._written = now
        content = {
            "state": state,
            **self._known,
            "updated": _now(),
            **asdict(snapshot),
            "failed": snapshot.failed,
            "steps": [
                {**asdict(pace.step), "rows_per_s": pace.rate, "seconds_left": pace.left}
                for pace in paces
            ],
        }
        part = self._path.with_name(f"{self._path.name}.part")
        # a full disk, or a reader that has the file open on Windows: a later version may succeed
        with suppress(OSError):
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self._path)


def status_path(progress: Path) -> Path:
    """Return the path of the status file that belongs to a progress file."""
    return progress.with_name(f"{progress.name.removesuffix('.progress')}.status")


def read_status(progress: Path) -> Mapping[str, Any] | None:
    """Return the newest status of a run; None if there is none."""
    with suppress(OSError, ValueError):
        status: Mapping[str, Any] = json.loads(status_path(progress).read_text(encoding="utf-8"))
        return status
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
