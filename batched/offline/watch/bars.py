"""Bars of a run, one for each step, drawn by rich in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..report import ENDS, Pace, Snapshot, State
from .lines import describe


class Bars:
    """View of a run as bars on stderr."""

    def __init__(self, output: str, console: Console | None = None) -> None:
        self._output = output
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console or Console(stderr=True),
            auto_refresh=False,  # a refresh of its own would take a thread
            # output of the function goes above the bars, but into a file if the user asked for one
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._tasks: list[TaskID] = []
        self._writing: TaskID | None = None

    def __call__(self, state: State, snapshot: Snapshot, paces: Sequence[Pace]) -> None:
        """Draw the run as it is now."""
        progress = self._progress
        if not self._tasks:
            if state in ENDS:
                return  # too short a run to be seen
            self._tasks = [progress.add_task(pace.step.name, text="") for pace in paces]
            progress.start()
        for task, pace in zip(self._tasks, paces, strict=True):
            text = describe(pace, snapshot)
            progress.update(task, completed=pace.done, total=snapshot.total, text=text)
        if state == "writing" and self._writing is None:
            self._writing = progress.add_task(f"writing {self._output}", total=None, text="")
        if state in ENDS:
            if self._writing is not None:
                progress.remove_task(self._writing)
            progress.stop()
        else:
            progress.refresh()
