"""Pictures of figures: panels next to each other, each with lines over groups or horizontal
bars.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib import figure as pyplot
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine

from report import shown

OURS, OTHERS = "#1f6feb", "#a3adb8"
COLOURS = (
    OURS,
    "#bf3989",
    "#bc4c00",
    "#1a7f37",
    "#8250df",
    "#9a6700",
    "#57606a",
    "#0a3069",
    "#cf222e",
)
"""Colours of lines, ours first."""
TEXT = "#57606a"
BAR = 0.7
"""Width of a bar; the distance of two bars is 1."""
ROW = 0.36
"""Height of a bar with its gap (inches)."""
LINES, HEAD, LEGEND = 3.6, 0.7, 0.22
"""Heights of a panel of lines, of a title, and of a line of the legend or the note (inches)."""
ACROSS = 5
"""Entries in a line of the legend."""


@dataclass(frozen=True)
class Panel:
    """One chart: with `groups` a line for each series over them, without groups a bar for each
    series.
    """

    title: str
    series: dict[str, list[float]]
    """Values by name, one for each group; NaN where there is none."""
    groups: list[str] = field(default_factory=list)
    below: str = ""
    """Label of the groups."""


def draw(title: str, note: str, panels: Sequence[Panel], output: Path) -> None:
    """Write a PNG. Its title ends with the first question mark."""
    colours = _colours(panels)
    across = 1 if any(not panel.groups for panel in panels) else min(len(panels), 2)
    heights = [
        LINES if panel.groups else ROW * len(panel.series) + HEAD for panel in panels[::across]
    ]
    legend = LEGEND * (math.ceil(len(colours) / ACROSS) + 1) if colours else 0.0
    lines = textwrap.wrap(note.partition("\n")[0], 170) + note.splitlines()[1:]
    bottom = LEGEND * (len(lines) + 1) + legend
    height = bottom + sum(heights) + HEAD
    made = pyplot.Figure(
        figsize=(11, height),
        layout=ConstrainedLayoutEngine(
            rect=(0.01, bottom / height, 0.98, 1 - (bottom + HEAD) / height)
        ),
    )
    axes = made.subplots(len(heights), across, squeeze=False, height_ratios=heights)
    for place, panel in zip(axes.flat, panels, strict=False):
        if panel.groups:
            _lines(place, panel, colours)
        else:
            _bars(place, panel)
    for place in axes.flat[len(panels) :]:
        place.set_axis_off()
    if colours:
        drawn = {line.get_label(): line for place in axes.flat for line in place.get_lines()}
        handles, place_of_legend = (
            [drawn[name] for name in colours],
            (0.01, (bottom - legend) / height),
        )
        made.legend(
            handles,
            list(colours),
            loc="lower left",
            bbox_to_anchor=place_of_legend,
            ncols=ACROSS,
            frameon=False,
            fontsize=9,
        )
    question = textwrap.fill(re.split(r"(?<=\?)", title)[0], 95)
    made.text(0.02, 1 - HEAD / 2 / height, question, fontsize=12, fontweight="bold", va="center")
    made.text(0.02, LEGEND / 2 / height, "\n".join(lines), color=TEXT, fontsize=7.5, va="bottom")
    made.savefig(output, format="png", dpi=100)


def _colours(panels: Sequence[Panel]) -> dict[str, str]:
    """Return the colours of lines by name: the same in all panels, and ours first."""
    names = sorted(
        dict.fromkeys(name for panel in panels if panel.groups for name in panel.series),
        key=lambda name: not _ours(name),
    )
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _ours(name: str) -> bool:
    return name.startswith("ours")


def _bars(axes: Axes, panel: Panel) -> None:
    names = list(panel.series)
    values = [panel.series[name][0] for name in names]
    rows = range(len(names))
    compared = any(map(_ours, names))
    bars = axes.barh(
        rows,
        values,
        height=BAR,
        color=[OTHERS if compared and not _ours(name) else OURS for name in names],
    )
    axes.bar_label(bars, [shown(value) for value in values], padding=4, fontsize=9)
    axes.set_yticks(rows, [name.replace("ours", "this project") for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_title(panel.title, loc="left", fontsize=11, color=TEXT)
    axes.tick_params(length=0)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _lines(axes: Axes, panel: Panel, colours: dict[str, str]) -> None:
    for name, values in panel.series.items():
        known = [place for place, value in enumerate(values) if not math.isnan(value)]
        width, above = (2.5, 3) if _ours(name) else (1.3, 2)
        points = [values[place] for place in known]
        axes.plot(
            known,
            points,
            marker="o",
            markersize=4,
            color=colours[name],
            label=name,
            linewidth=width,
            zorder=above,
        )
    axes.set_xticks(range(len(panel.groups)), panel.groups)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.below, color=TEXT)
    axes.set_title(panel.title, loc="left", fontsize=11, color=TEXT)
    axes.grid(axis="y", color="#d0d7de", linewidth=0.6)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
