"""The dashboard, the alerts and the page on observability know the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import batched
import batched.metrics
from batched._operations.families import COUNTERS, GAUGES, HISTOGRAMS

client: Any = pytest.importorskip("prometheus_client")
DOCS = Path(batched.__file__).parents[1] / "docs"
BOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
ASKED = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
ALERTS = (DOCS / "alerts.yml").read_text()
PAGE = (DOCS / "observability.md").read_text()


def test_the_dashboard_and_the_alerts_ask_for_what_a_service_exposes() -> None:
    registry = client.CollectorRegistry()
    batched.metrics.prometheus(registry=registry)

    @batched.dynamically(name="exposed")
    def fn(items: list[int]) -> list[int]:
        return items

    with fn:
        fn([1, 2])
    labels: dict[str, set[str]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.labels.get("function") == "exposed":
                labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    for text in (*ASKED, ALERTS):
        assert {*re.findall(r"\bbatched_\w+", text)} <= labels.keys()
        for by, inner in re.findall(r"sum by \(([^)]*)\) \((.*?)[{\[)]", text):
            [name] = re.findall(r"batched_\w+", inner)
            assert {*by.split(", ")} <= labels[name]
    for name, *_ in (*COUNTERS, *GAUGES, *HISTOGRAMS):
        assert f"`batched_{name}" in PAGE


def test_each_panel_shows_the_chosen_functions_and_instances() -> None:
    chosen = {each["name"] for each in BOARD["templating"]["list"]}
    assert chosen == {"datasource", "function", "instance"}
    for expr in ASKED:
        metrics = re.findall(r"batched_\w+\{([^}]*)\}", expr)
        assert len(metrics) == expr.count("batched_")
        for labels in metrics:
            assert 'function=~"$function"' in labels
            assert 'instance=~"$instance"' in labels


def test_the_page_explains_each_alert() -> None:
    alerts = re.findall(r"alert: (\w+)", ALERTS)
    assert alerts == re.findall(r"^\| `(Batched\w+)` \|", PAGE, re.MULTILINE)
