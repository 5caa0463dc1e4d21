"""Progress, tables and pictures of the commands, in one style."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

UNBATCHED, BATCHED, P99 = "#a3adb8", "#1f6feb", "#cf222e"
COLOURS = {"unbatched": UNBATCHED, "one by one": UNBATCHED, "batched": BATCHED, "p50": BATCHED}
GREY = "#57606a"
"""Colour of what explains a picture."""
BARS = 0.8
"""Width of all bars of a group, where groups are 1 apart."""
MOST_LABELS = 4
"""Most groups of bars on which there is room for their values."""


def check_writable(output: Path) -> None:
    """Returns if a picture can be written there.

    Raises:
        argparse.ArgumentError: it cannot.
    """
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise argparse.ArgumentError(None, f"no file can be written at {output}")


def new_console() -> Console:
    """Console that prints sentences as they are."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def progress_bars(console: Console) -> Progress:
    """Bars with a description, a count and the time; none where nobody looks."""
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def add_bar(progress: Progress, description: str, total: int) -> Callable[[], object]:
    """Function that moves a new bar on by one of `total`."""
    task = progress.add_task(description, total=total)
    return lambda: progress.advance(task)


def new_table(title: str, *heads: str) -> Table:
    """Table with these columns and no rows yet."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def new_figure(title: str, note: str) -> Figure:
    """Figure with a title above and a note below the place of its axes."""
    figure = Figure(figsize=(11, 5))
    figure.text(0.03, 0.93, title, fontsize=14, fontweight="bold")
    figure.text(0.03, 0.03, note, color=GREY, fontsize=9)
    figure.subplots_adjust(left=0.06, right=0.97, top=0.82, bottom=0.16, wspace=0.16)
    return figure


def draw_bars(
    axes: Axes, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float]]
) -> None:
    """Draws `series` of one value per group beside each other, each in the colour of its name."""
    width = BARS / len(series)
    labelled = len(groups) <= MOST_LABELS
    for number, (name, values) in enumerate(series.items()):
        left = (number + 0.5) * width - BARS / 2
        places = [group + left for group in range(len(groups))]
        bars = axes.bar(places, values, 0.95 * width, color=COLOURS.get(name, P99), label=name)
        if labelled:
            axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(x=0.02, y=0.25)
    axes.yaxis.set_visible(not labelled)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    style_axes(axes, title)


def style_axes(axes: Axes, title: str) -> None:
    """Gives `axes` a title of their own, and takes away the ticks and spines."""
    axes.set_title(title, loc="left", fontsize=11, color=GREY)
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)


def save(figure: Figure, output: Path, console: Console, began: float) -> None:
    """Writes a PNG, and says where it is and how long all took since `began` on `perf_counter`."""
    figure.savefig(output, format="png", dpi=150)
    console.print(f"Picture: {output}\nTotal time: {time.perf_counter() - began:.1f} s")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
