"""The dashboard of Grafana and the page on observability know the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import batched
from batched._operations.families import COUNTERS, GAUGES, HISTOGRAMS

DOCS = Path(batched.__file__).parents[1] / "docs"


def test_the_dashboard_and_the_page_know_every_metric() -> None:
    known: dict[str, list[str]] = {}
    for end, metrics in (("_total", COUNTERS), ("", GAUGES), ("_bucket", HISTOGRAMS)):
        known |= {f"batched_{name}{end}": label[:1] for name, _, _, *label in metrics}
    board = json.dumps(json.loads((DOCS / "grafana.json").read_text())["panels"])
    asked = re.sub("_(sum|count)\\b", "_bucket", board)
    assert {*re.findall(r"\bbatched_\w+", asked)} <= {*known}
    grouped = ", ".join(re.findall(r"sum by \(([^)]*)\)", board)).split(", ")
    assert {*grouped} <= {"function", "le"}.union(*known.values())
    page = (DOCS / "observability.md").read_text()
    assert [name for name in known if f"`{name.removesuffix('_bucket')}" not in page] == []
