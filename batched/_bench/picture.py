"""The picture: what an item takes by the size of its batch, and what callers get by their
number.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from .._display import COLOURS, GREY, blank_figure, style_axes
from .advice import Advice, Fit, fold, ms
from .measuring import Load, Timing

P99_COLOUR = "#cf222e"
SPREAD = (10, 90)
"""Percentiles between which the bars reach."""


def draw(
    timings: list[Timing],
    fit: Fit,
    advice: Advice,
    loads: list[Load],
    batch_size: int,
    title: str,
    output: Path,
) -> None:
    """Writes a PNG."""
    spread = f"left: medians of direct calls, with bars from p{SPREAD[0]} to p{SPREAD[1]}"
    figure = blank_figure(
        title, f"{spread}; right: batch_size={batch_size}, each caller with one call at a time"
    )
    figure.subplots_adjust(left=0.06, right=0.95, top=0.82, bottom=0.16, wspace=0.16)
    halves = figure.add_gridspec(1, 2)
    _draw_items(figure.add_subplot(halves[0]), timings, fit, advice)
    quarters = halves[1].subgridspec(2, 1, hspace=0.45)
    _draw_rates(figure.add_subplot(quarters[0]), loads, timings[0].rate)
    _draw_latencies(figure.add_subplot(quarters[1]), loads)
    figure.savefig(output, format="png", dpi=150)


def _draw_items(axes: Axes, timings: list[Timing], fit: Fit, advice: Advice) -> None:
    sizes = [timing.size for timing in timings]
    medians = [timing.median.per_item * 1e3 for timing in timings]
    ends = [
        [timing.percentile(percent) / timing.size * 1e3 for timing in timings] for percent in SPREAD
    ]
    bars = np.abs(np.array(ends) - medians)
    curve = np.geomspace(sizes[0], sizes[-1], 200)
    fitted = f"{ms(fit.fixed)} / n + {ms(fit.per_item)}"
    axes.plot(
        curve,
        [fit.at(size) / size * 1e3 for size in curve],
        color=COLOURS["unbatched"],
        linewidth=2,
        label=fitted,
    )
    axes.errorbar(
        sizes, medians, bars, fmt="o", color=COLOURS["batched"], elinewidth=1.5, label="measured"
    )
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
    axes.axvline(
        advice.batch_size,
        color=COLOURS["batched"],
        linewidth=1,
        linestyle=":",
        zorder=0,
        label=f"batch_size={advice.batch_size}",
    )
    axes.margins(x=0.07, y=0.1)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _style_doublings(
        axes,
        "Time of an item in ms, by size of the batch (less is better)",
        "items in a batch (n)",
        sizes,
    )


def _draw_rates(axes: Axes, loads: list[Load], one_by_one: float) -> None:
    callers = [load.callers for load in loads]
    axes.axhline(one_by_one, color=COLOURS["unbatched"], linewidth=2, label="one by one")
    axes.plot(
        callers, [load.rate for load in loads], "o-", color=COLOURS["batched"], label="batched"
    )
    axes.annotate(
        fold(loads[-1].rate / one_by_one),
        (callers[-1], loads[-1].rate),
        (8, 0),
        textcoords="offset points",
        va="center",
        color=COLOURS["batched"],
        fontweight="bold",
    )
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    _style_doublings(axes, "Items a second (more is better)", "", callers)


def _draw_latencies(axes: Axes, loads: list[Load]) -> None:
    callers = [load.callers for load in loads]
    for percent, colour in ((50, COLOURS["batched"]), (99, P99_COLOUR)):
        axes.plot(
            callers,
            [load.latency(percent) for load in loads],
            "o-",
            color=colour,
            label=f"p{percent}",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend(frameon=False)
    _style_doublings(axes, "Latency of a call in ms (less is better)", "callers", callers)


def _style_doublings(axes: Axes, title: str, label: str, numbers: list[int]) -> None:
    """An axis on which doublings are equally far apart, with each of the numbers on it."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label, color=GREY)
    axes.grid(axis="y", color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    style_axes(axes, title)
