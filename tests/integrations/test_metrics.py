"""Metrics of all batched functions, as clients scrape them, and as dashboard and alerts ask."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import batched
import batched.metrics
from batched._operations.families import COUNTERS, GAUGES, HISTOGRAMS
from batched._runtime import observer
from stage import python

prometheus_client: Any = pytest.importorskip("prometheus_client")

DOCS = Path(batched.__file__).parents[1] / "docs"
BOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text())
ASKED = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
ALERTS = (DOCS / "alerts.yml").read_text()
PAGE = (DOCS / "observability.md").read_text()
FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def test_every_count_of_a_function_is_scraped_while_it_hangs_and_later() -> None:
    registry = prometheus_client.CollectorRegistry()
    batched.metrics.prometheus(registry=registry)
    batched.metrics.prometheus(registry=registry)  # changes nothing
    started, go = threading.Event(), threading.Event()

    @batched.dynamically(
        length=len, name="scraped", max_queue_size=2, on_full="raise", batch_size=2
    )
    def fn(items: list[str]) -> list[float]:
        if "wait" in items:
            started.set()
            assert go.wait(30)
        return [10 / (len(item) - 3) for item in items]

    def values(*names: str, **labels: str) -> list[float]:
        labels = {"function": "scraped", **labels}
        return [registry.get_sample_value(f"batched_{name}", labels) for name in names]

    load = "waiting_items", "blocked_calls", "running_items", "open_calls", "queue_limit_items"
    with fn:
        assert fn(["a", "ab"]) == [-5, -10]
        with pytest.raises(ZeroDivisionError):
            fn("abc")
        calls = [fn.submit("wait")]
        assert started.wait(30)
        calls += [fn.submit("b"), fn.submit("c")]
        with pytest.raises(batched.QueueFull):
            fn("d")
        assert values(*load, "calls_total") == [2, 0, 1, 3, 2, 5]
        assert calls.pop().cancel()
        go.set()
        assert [call.result() for call in calls] == [10, -5]
    reasons = "error", "cancelled", "timed_out", "rejected", "lost"
    failed = [values("failed_calls_total", reason=reason) for reason in reasons]
    assert failed == [[1], [1], [0], [1], [0]]
    assert values("calls_total", "items_total", "batch_size_sum") == [5, 5, 5]
    assert values("tokens_total", "padding_tokens_total") == [4 + 3 + 4 + 1, 1]
    assert values("batch_size_bucket", le="1.0") == [3]
    assert values("processing_seconds_bucket", "queue_wait_seconds_bucket", le="+Inf") == [4, 4]
    fn.reset_stats()
    del fn, calls
    assert values("calls_total", *load[:4]) == [5, 0, 0, 0, 0]


def test_a_registration_that_fails_changes_nothing_and_may_be_repeated() -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    taken = prometheus_client.Counter("batched_items", "Taken.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        batched.metrics.prometheus(registry=registry)
    assert b"batched_calls" not in prometheus_client.generate_latest(registry)
    registry.unregister(taken)
    batched.metrics.prometheus(registry=registry)
    assert b"batched_calls" in prometheus_client.generate_latest(registry)


def test_opentelemetry_has_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics: Any = pytest.importorskip("opentelemetry.sdk.metrics")
    monkeypatch.setattr(observer, "meters", [])
    reader = metrics.export.InMemoryMetricReader()
    provider = metrics.MeterProvider([reader], shutdown_on_exit=False)
    batched.metrics.opentelemetry(provider=provider)
    during: dict[str, Any] = {}

    @batched.dynamically(name="measured")
    def fn(items: list[int]) -> list[int]:
        during.update(collect())
        return items

    def collect() -> dict[str, Any]:
        found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        points = [(each.name, point) for each in found for point in each.data.data_points]
        return {name: point for name, point in points if point.attributes["function"] == "measured"}

    with fn:
        assert fn([1, 2]) == [1, 2]
    assert during["batched.open_calls"].value == during["batched.calls"].value == 1
    found = collect()
    names = {name.removesuffix("_seconds") for name, *_ in (*COUNTERS, *GAUGES, *HISTOGRAMS)}
    assert set(found) == {f"batched.{name}" for name in names}
    assert found["batched.items"].value == found["batched.batch_size"].sum == 2
    assert found["batched.queue_wait"].count == 1
    provider.shutdown()


SERVICE = """
    import asyncio, contextlib, os, struct, sys, time
    import batched, batched.metrics, prometheus_client
    from prometheus_client.parser import text_string_to_metric_families

    @batched.dynamically(batch_size=1)
    def fn(items):
        while "hang" in items:
            time.sleep(0.01)
        return items

    async def page():
        parts = []
        async def receive():
            return {"type": "http.request"}
        async def send(message):
            parts.append(message.get("body", b""))
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
        await app(scope, receive, send)
        return b"".join(parts).decode()

    def values(*names):
        found = {
            sample.labels.get("reason", sample.name.removeprefix("batched_")): sample.value
            for family in text_string_to_metric_families(asyncio.run(page()))
            for sample in family.samples
            if sample.labels.get("function", "fn") == "fn"
        }
        return [found.get(name) for name in names]
"""


def run(code: str) -> str:
    ended = python(SERVICE + code)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.once
def test_counts_begin_with_the_registration() -> None:
    found = run("""
    fn(1)
    app = batched.metrics.asgi_app()
    fn(2)
    print(values("calls_total", "items_total", "batch_size_count", "python_info"))
    """)
    assert found == "[1.0, 1.0, 1.0, 1.0]\n"


@pytest.mark.once
def test_a_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, "absent")
    ended = python("import batched.metrics\nbatched.metrics.prometheus()")
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'absent'" in ended.stderr


@pytest.mark.once
@pytest.mark.skipif(not hasattr(os, "fork"), reason="prometheus-client shares folders on POSIX")
def test_a_scrape_answers_for_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    found = run("""
    prometheus_client.Counter("mine", "Of the user.").inc(4)
    app = batched.metrics.asgi_app()
    fn(1)
    if not (child := os.fork()):
        fn(2), fn(3)
        futures = [fn.submit("hang"), fn.submit(4), fn.submit(5)]
        time.sleep(600)
    load = "waiting_items", "running_items", "open_calls"
    found = []
    while found != [2, 1, 3, 6]:  # the process shows them in time
        time.sleep(0.01)
        with contextlib.suppress(struct.error):  # prometheus_client reads a file that is empty yet
            found = values(*load, "calls_total")
    os.kill(child, 9), os.waitpid(child, 0)
    if not (quick := os.fork()):
        sys.exit(fn(6) - 6)
    os.waitpid(quick, 0)
    for _ in range(2):
        print(values(*load, "calls_total", "items_total", "lost", "mine_total"))
    """)
    assert found == 2 * "[0.0, 0.0, 0.0, 7.0, 4.0, 3.0, 4.0]\n"


def test_the_dashboard_and_the_alerts_ask_for_what_a_service_exposes() -> None:
    registry = prometheus_client.CollectorRegistry()
    batched.metrics.prometheus(registry=registry)

    with batched.dynamically(name="exposed")(lambda items: items) as fn:
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
