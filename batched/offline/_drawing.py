"""Drawing: a bar for each step of a run that goes on, in a terminal by rich, in a notebook as HTML
that is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from html import escape
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ._html import Html, html_table
from ._report import Snapshot
from ._watch import ENDS, Pace, State

TEXTS: Final = ("step", "rows", "rate", "failed", "left")
"""Texts beside a bar, the first before it."""


class Bars:
    """Bars in a terminal, on stderr."""

    def __init__(self, output: str, console: Console | None = None) -> None:
        self._output = output
        name, *others = [
            TextColumn(f"{{task.fields[texts][{text}]}}", markup=False) for text in TEXTS
        ]
        self._progress = Progress(
            *(name, BarColumn(), *others),
            console=console or Console(stderr=True),
            auto_refresh=False,  # which would take a thread
            # what the function prints goes above the bars, but into a file where that is asked for
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._tasks: list[TaskID] = []
        self._writing: TaskID | None = None

    def __call__(self, state: State, _: Snapshot, paces: Sequence[Pace]) -> None:
        progress = self._progress
        if not self._tasks:
            if state in ENDS:
                return  # over before there was anything to see
            self._tasks = [progress.add_task("", total=None, texts=_texts(pace)) for pace in paces]
            progress.start()
        for task, pace in zip(self._tasks, paces, strict=True):
            progress.update(task, completed=pace.done, total=pace.total, texts=_texts(pace))
        if state == "writing" and self._writing is None:
            texts = {**dict.fromkeys(TEXTS, ""), "step": f"writing {self._output}"}
            self._writing = progress.add_task("", total=None, texts=texts)
        if state in ENDS:
            if self._writing is not None:
                progress.remove_task(self._writing)
            progress.stop()
        else:
            progress.refresh()


class NotebookBars:
    """Bars in the output of a notebook's cell."""

    def __init__(self, output: str) -> None:
        self._output = output
        self._shown: Any = None  # IPython's handle of what is displayed

    def __call__(self, state: State, _: Snapshot, paces: Sequence[Pace]) -> None:
        # every notebook has it
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        rows = []
        for pace in paces:
            name, *others = _texts(pace).values()
            of = "" if pace.total is None else f' value="{pace.done}" max="{pace.total}"'
            rows.append([name, Html(f"<progress{of}></progress>"), *others])
        html = HTML(f"{html_table((), rows)}<p>{escape(f'{state}: {self._output}')}</p>")
        if self._shown is None:
            self._shown = display(html, display_id=True)
        else:
            self._shown.update(html)


def _texts(pace: Pace) -> dict[str, str]:
    """What is said of one step beside its bar, in the order of `TEXTS`."""
    of = "" if pace.total is None else f"/{pace.total:,}"
    failed = pace.step.failed
    left = pace.left
    return {
        "step": pace.step.name,
        "rows": f"{pace.done:,}{of} rows",
        "rate": "" if pace.rate is None else f"{pace.rate:,.1f} rows/s",
        "failed": f"{failed:,} failed" if failed else "",
        "left": f"{timedelta(seconds=round(left))} left" if left else "",
    }
