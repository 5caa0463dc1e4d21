"""Picture: the time of an item by the size of its batch, and what callers get by their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..display import BATCHED, GREY, UNBATCHED, draw_bars, new_figure, style_axes
from .advice import Advice, Fit, ms
from .measuring import Load, Timing

SPREAD = (10, 90)
"""Percentiles between which the bars of errors reach."""


def draw(
    timings: list[Timing],
    fit: Fit,
    advice: Advice,
    loads: Sequence[Load],
    batch_size: int,
    title: str,
) -> Figure:
    """Figure of what was measured."""
    spread = f"left: medians of direct calls, with bars from p{SPREAD[0]} to p{SPREAD[1]}"
    figure = new_figure(
        title, f"{spread}; right: batch_size={batch_size}, each caller with one call at a time"
    )
    halves = figure.add_gridspec(1, 2)
    _draw_items(figure.add_subplot(halves[0]), timings, fit, advice)
    quarters = halves[1].subgridspec(2, 1, hspace=0.45)
    callers = [f"{load.callers:,}" for load in loads]
    draw_bars(
        figure.add_subplot(quarters[0]),
        "Items a second, by number of callers (more is better)",
        callers,
        {
            "one by one": [timings[0].rate] * len(loads),
            "batched": [load.rate for load in loads],
        },
    )
    draw_bars(
        figure.add_subplot(quarters[1]),
        "Latency of a call in ms, by number of callers (less is better)",
        callers,
        {f"p{q}": [load.percentile(q) * 1e3 for load in loads] for q in (50, 99)},
    )
    return figure


def _draw_items(axes: Axes, timings: list[Timing], fit: Fit, advice: Advice) -> None:
    sizes = [timing.size for timing in timings]
    medians = [timing.median.per_item * 1e3 for timing in timings]
    ends = [
        [timing.percentile(percent) / timing.size * 1e3 for timing in timings] for percent in SPREAD
    ]
    bars = np.abs(np.array(ends) - medians)
    curve = np.geomspace(sizes[0], sizes[-1], 200)
    times = [fit.at(size) / size * 1e3 for size in curve]
    fitted = f"{ms(fit.fixed)} / n + {ms(fit.per_item)}"
    axes.plot(curve, times, color=UNBATCHED, linewidth=2, label=fitted)
    axes.errorbar(sizes, medians, bars, fmt="o", color=BATCHED, elinewidth=1.5, label="measured")
    for size, median in zip(sizes, medians, strict=True):
        weight = "bold" if size == advice.batch_size else "normal"
        axes.annotate(
            ms(median / 1e3),
            (size, median),
            (4, 5),
            textcoords="offset points",
            fontsize=9,
            fontweight=weight,
        )
    recommended = f"batch_size={advice.batch_size}"
    axes.axvline(
        advice.batch_size, color=BATCHED, linewidth=1, linestyle=":", zorder=0, label=recommended
    )
    axes.margins(x=0.07, y=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("items in a batch (n)", color=GREY)
    axes.grid(axis="y", color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    style_axes(axes, "Time of an item in ms, by size of the batch (less is better)")
