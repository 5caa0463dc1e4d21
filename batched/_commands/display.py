"""Progress, tables and numbers of the commands, in one style."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .load import Calls


def new_console() -> Console:
    """Return a console that prints sentences unchanged."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def new_table(title: str, *heads: str) -> Table:
    """Return a table with these columns and without rows."""
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


def load_table(title: str, items: str, *sections: Mapping[str, Calls]) -> Table:
    """Return the rates and latencies of calls by name, compared with the first of their section."""
    rate = f"{items}\na second"
    table = new_table(title, "Callers", rate, "Speed-up", "p50\nms", "p99\nms", "Mean\nbatch")
    for section in sections:
        alone, *_ = section.values()
        for name, calls in section.items():
            table.add_row(
                name,
                f"{calls.rate:,.0f}",
                format_ratio(calls.rate / alone.rate),
                ms(calls.percentile(50)),
                ms(calls.percentile(99)),
                f"{calls.mean_batch:.1f}",
                style="" if calls is alone else "bold",
            )
        table.add_section()
    return table


def ms(seconds: float) -> str:
    """Return a time in milliseconds, with three significant digits below 100 ms."""
    value = seconds * 1e3
    if value < 1e-3:
        return f"{value:.6f}"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def format_ratio(ratio: float) -> str:
    """Return a multiple, as "3.2x", with at least two digits."""
    return f"{ratio:.1f}x" if ratio >= 0.95 else f"{ratio:.2g}x"


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
