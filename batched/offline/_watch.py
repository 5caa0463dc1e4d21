"""Watching: what is seen of a run while it goes on.

1. The coordinator tells the watcher a few times a second, and is never held up or ended by it: a
   view that fails is logged and dropped.
2. `<result>.status.json` is written whether anybody looks or not, for `batched status`; bars are
   drawn in a terminal or a notebook.
3. The rate of a step is that of the rows that it has computed itself, in the last minutes, counted
   from the end of its first batch: rows that were done before are in no rate, nor is the time in
   which a model is built.
4. Time left is the work left, rows that are still to come through a step, at that step's own rate.
   No step ends before the one that it reads from; so the run takes as long as its slowest.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from .._runtime.wakers import log_failure
from ._report import Snapshot, StepCounts

State = Literal["running", "writing", "done", "stopped", "interrupted", "failed"]
"""`writing`: all rows are done, the result is being written. `stopped`: by the budget of failed
rows, or because nothing succeeded any more.
"""
ENDS: Final = ("done", "stopped", "interrupted", "failed")

SPAN: Final = 300.0
"""Time over which a rate is the mean (s): longer than batches usually take, and than the rows that
are sorted by length at once; short enough to follow a service that has become slow.
"""
PERIOD: Final = 1.0
"""Time between two versions of the status file (s)."""


@dataclass(frozen=True)
class Pace:
    """How far one step is, and how fast."""

    step: StepCounts
    done: int
    """Rows of the source that are through with the step, or were before it, or have failed."""
    total: int | None
    """Rows of the source, if their number is known."""
    rate: float | None
    """Rows a second, of those computed in this run; None before a second batch has ended."""
    left: float | None
    """Time until its last row is done (s), if that can be told."""


View = Callable[[State, Snapshot, Sequence[Pace]], None]
"""Whoever shows what is known of a run; it may raise."""


def watcher(watch: bool | Callable[[Snapshot], None], progress_path: Path, output: str) -> Watcher:
    """Watcher of a run: of the status file and, as `watch` says, of bars, or of a function."""
    views: list[View] = [StatusFile(status_path(progress_path), progress_path, output)]
    if callable(watch):
        views.append(lambda _state, snapshot, _paces: watch(snapshot))
    elif watch:
        # rich and IPython are loaded only where there is something to draw on
        if _in_notebook():
            from ._drawing import NotebookBars

            views.append(NotebookBars(output))
        elif sys.stderr is not None and sys.stderr.isatty():
            from ._drawing import Bars

            views.append(Bars(output))
    return Watcher(views)


class Watcher:
    """All views of a run."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = list(views)
        self._meters: list[Meter] = []

    def update(self, snapshot: Snapshot) -> None:
        """Shows a run that goes on. Never raises."""
        self._show("running", snapshot)

    def merge(self, snapshot: Snapshot) -> None:
        """Shows that all rows are done, and the result is being written. Never raises."""
        self._show("writing", snapshot)

    def end(self, snapshot: Snapshot, state: State) -> None:
        """Shows how the run has ended. Never raises."""
        self._show(state, snapshot)

    def _show(self, state: State, snapshot: Snapshot) -> None:
        paces = self._paces(snapshot)
        for view in list(self._views):
            try:
                view(state, snapshot, paces)
            except Exception:
                self._views.remove(view)
                log_failure("a view of an offline run failed, and is shown no more")

    def _paces(self, snapshot: Snapshot) -> list[Pace]:
        if not self._meters:
            self._meters = [Meter() for _ in snapshot.steps]
        paces: list[Pace] = []
        done, slowest = snapshot.read, 0.0
        for step, meter in zip(snapshot.steps, self._meters, strict=True):
            meter.add(snapshot.seconds, step)
            done -= step.waiting  # a row that waits in a step waits for all later ones
            rate, left = meter.rate, None
            if snapshot.total is not None and rate:
                left = slowest = max(slowest, (snapshot.total - done) / rate)
            paces.append(Pace(step, done, snapshot.total, rate, left))
        return paces


class Meter:
    """Rate of one step."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque()  # moment (s), rows computed by then
        self._batches = 0
        self._longest = 0.0  # between two ends (s)
        self._now = 0.0

    def add(self, now: float, step: StepCounts) -> None:
        """Notes the counts of the step `now` seconds after the run began."""
        self._now = now
        if step.batches == self._batches:
            return
        self._batches = step.batches
        ends = self._ends
        if ends:
            self._longest = max(self._longest, now - ends[-1][0])
        ends.append((now, step.ok + step.failed))
        while len(ends) > 2 and ends[1][0] < now - SPAN:
            ends.popleft()

    @property
    def rate(self) -> float | None:
        """Rows a second; None before the end of a second batch."""
        if len(self._ends) < 2:
            return None
        (first, before), (last, rows) = self._ends[0], self._ends[-1]
        # a batch that takes longer than all others has slowed the step down; until then the time
        # since the last end says nothing
        seconds = max(last, self._now - self._longest) - first
        return (rows - before) / seconds if seconds else None


class StatusFile:
    """View that is a file: whole at every moment, at most one version a second."""

    def __init__(self, path: Path, progress: Path, output: str) -> None:
        self._path = path
        self._written = -math.inf
        self._known = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": _now(),
            "result": output,
            "progress": str(progress),
        }

    def __call__(self, state: State, snapshot: Snapshot, paces: Sequence[Pace]) -> None:
        now = time.perf_counter()
        if state == "running" and now - self._written < PERIOD:
            return
        self._written = now
        content = {
            "state": state,
            **self._known,
            "updated": _now(),
            **asdict(snapshot),
            "steps": [
                {**asdict(pace.step), "rows_per_s": pace.rate, "seconds_left": pace.left}
                for pace in paces
            ],
        }
        part = self._path.with_name(f"{self._path.name}.part")
        # a full disk, or a reader that has the file open on Windows: the next version may do
        with suppress(OSError):
            part.write_text(json.dumps(content), encoding="utf-8")
            part.replace(self._path)


def status_path(progress: Path) -> Path:
    """Path of the status file that belongs to a progress file."""
    return progress.with_name(f"{progress.name.removesuffix('.progress')}.status.json")


def read_status(progress: Path) -> Mapping[str, Any] | None:
    """The newest status of a run; None: there is none."""
    try:
        content = json.loads(status_path(progress).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _now() -> str:
    """This moment, for people to read."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _in_notebook() -> bool:
    """Whether cells of a notebook show what is displayed."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
