"""How commands show what they found: progress, tables and pictures of one style."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

COLOURS = {"unbatched": "#a3adb8", "batched": "#1f6feb"}
GREY = "#57606a"
"""The colour of what explains a picture."""


def check_writable(output: Path) -> None:
    """Returns if a picture can be written there.

    Raises:
        argparse.ArgumentError: it cannot.
    """
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise argparse.ArgumentError(None, f"no file can be written at {output}")


def progress_on(console: Console) -> Progress:
    """Bars with a description, a count and the time; none where nobody looks."""
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def blank_table(title: str) -> Table:
    """A table without columns yet."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def blank_figure(title: str, note: str) -> Figure:
    """A figure with a title above and a note below the place of its axes."""
    figure = Figure(figsize=(11, 5))
    figure.text(0.03, 0.93, title, fontsize=14, fontweight="bold")
    figure.text(0.03, 0.03, note, color=GREY, fontsize=9)
    return figure


def style_axes(axes: Axes, title: str) -> None:
    """Gives `axes` a title of their own, and takes away the ticks and spines."""
    axes.set_title(title, loc="left", fontsize=11, color=GREY)
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
