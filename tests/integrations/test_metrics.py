"""Metrics and traces of all batched functions, with the clients of Prometheus and OpenTelemetry."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import batched
import batched.metrics
import batched.tracing
from batched._operations import counts
from batched._operations.families import METRICS
from batched._runtime import observer, recorder
from stage import end_together

pytestmark = pytest.mark.once


@pytest.fixture
def value() -> Callable[..., float]:
    """Return a function that scrapes one value."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    batched.metrics.prometheus(registry=registry)

    def scrape(name: str, **labels: str) -> float:
        found = registry.get_sample_value(f"batched_{name}", labels)
        assert found is not None, (name, labels)
        return float(found)

    return scrape


@pytest.fixture
def probed() -> Iterator[None]:
    """Remove the probe of all batches afterwards."""
    yield
    observer.probe = None


def test_every_count_of_a_function_is_scraped(value: Callable[..., float]) -> None:
    started, go = threading.Event(), threading.Event()

    @batched.dynamically(
        length=len, name="scraped", max_queue_size=2, on_full="raise", batch_size=2
    )
    def fn(items: list[str]) -> list[int]:
        if "wait" in items:
            started.set()
            assert go.wait(30)
        return [10 // (len(item) - 3) for item in items]

    with fn:
        assert fn(["a", "ab"]) == [-5, -10]
        with pytest.raises(ZeroDivisionError):
            fn("abc")
        running = fn.submit("wait")
        assert started.wait(30)
        waiting = fn.submit("b"), fn.submit("c")
        with pytest.raises(batched.QueueFull):
            fn("d")
        assert value("waiting_items", function="scraped") == 2
        assert value("running_items", function="scraped") == 1
        assert waiting[1].cancel()
        go.set()
        assert (running.result(), waiting[0].result()) == (10, -5)
    reasons = {
        reason: value("failed_calls_total", function="scraped", reason=reason)
        for reason in ("error", "cancelled", "timed_out", "rejected")
    }
    assert reasons == {"error": 1, "cancelled": 1, "timed_out": 0, "rejected": 1}
    assert value("calls_total", function="scraped") == 5
    assert value("items_total", function="scraped") == 5
    assert value("tokens_total", function="scraped") == 4 + 3 + 4 + 1
    assert value("padding_tokens_total", function="scraped") == 1
    assert value("batch_size_count", function="scraped") == 4
    assert value("batch_size_sum", function="scraped") == 5
    assert value("batch_size_bucket", function="scraped", le="1") == 3
    assert value("batch_size_bucket", function="scraped", le="2") == 4
    assert value("queue_wait_seconds_count", function="scraped") == 4
    assert value("processing_seconds_bucket", function="scraped", le="+Inf") == 4
    assert value("processing_seconds_sum", function="scraped") > 0
    assert value("waiting_items", function="scraped") == 0


def test_counts_keep_growing_when_statistics_are_reset_and_instances_are_gone(
    value: Callable[..., float],
) -> None:
    class Model:
        @batched.dynamically(name="of_instances")
        def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    for number in range(3):
        model = Model()
        assert model.double(number) == 2 * number
        if number:
            model.double.reset_stats()
            assert model.double.stats.calls == 0
        assert value("calls_total", function="of_instances") == number + 1
    del model
    gc.collect()
    assert value("calls_total", function="of_instances") == 3
    for number in range(2 * recorder.MOST_UNREAD):  # counts of gone instances are summed up
        Model().double(number)
    assert len(recorder._ended) <= recorder.MOST_UNREAD + 1
    assert value("calls_total", function="of_instances") == 3 + 2 * recorder.MOST_UNREAD


def test_a_registry_has_the_metrics_once() -> None:
    from prometheus_client import CollectorRegistry, Counter

    registry = CollectorRegistry(auto_describe=True)
    batched.metrics.prometheus(registry=registry)
    batched.metrics.prometheus(registry=registry)
    other = CollectorRegistry(auto_describe=True)
    Counter("batched_items", "Taken.", registry=other)
    with pytest.raises(ValueError, match="Duplicated"):
        batched.metrics.prometheus(registry=other)


def python(code: str, folder: Path, *, ok: bool = True) -> str:
    """Return the output of a process that shares its counts."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, counts.FOLDER: str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not ok or ended.returncode == 0, ended.stderr
    return ended.stdout


DOUBLE = """
    import os, signal, sys, time
    import batched, batched.metrics
    from prometheus_client import CollectorRegistry
    registry = CollectorRegistry()
    batched.metrics.prometheus(registry=registry)

    @batched.dynamically
    def double(numbers):
        return [2 * number for number in numbers]

    def calls():
        return registry.get_sample_value("batched_calls_total", {"function": "double"})
"""


def test_counts_of_ended_processes_stay_and_gauges_do_not(tmp_path: Path) -> None:
    python(DOUBLE + "    double(1), double(2)\n", tmp_path)
    found = python(
        DOUBLE + "    double(3)\n    print(calls())\n"
        "    waiting = {'function': 'double'}\n"
        "    print(registry.get_sample_value('batched_waiting_items', waiting))\n",
        tmp_path,
    )
    assert found == "3\n0\n"
    (first, _) = sorted(tmp_path.glob("batched_*.json"), key=lambda path: path.stat().st_mtime)
    saved = json.loads(first.read_text())
    saved["double"] = [entry for entry in saved["double"] if entry[0] != "waiting"]
    first.write_text(json.dumps({"double": [*saved["double"], ["waiting", "", 5]]}))
    found = python(
        DOUBLE + "    double\n    print(registry.get_sample_value('batched_waiting_items', "
        "{'function': 'double'}))\n",
        tmp_path,
    )
    assert found == "0\n"


def test_a_killed_process_has_written_its_counts(tmp_path: Path) -> None:
    python(
        DOUBLE
        + """
    double(1), double(2)
    import pathlib
    folder = pathlib.Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    while '["calls", "", 2]' not in "".join(path.read_text() for path in folder.glob("*.json")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
""",
        tmp_path,
        ok=False,
    )
    assert python(DOUBLE + "    double(3)\n    print(calls())\n", tmp_path) == "3\n"


def test_other_processes_see_calls_that_wait_and_run(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code = (
        DOUBLE
        + f"""
    import pathlib

    @batched.dynamically(batch_size=1, name="held")
    def held(items):
        while not pathlib.Path({str(gate)!r}).exists():
            time.sleep(0.01)
        return items

    futures = [held.submit(1), held.submit(2)]
    [future.result() for future in futures]
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, counts.FOLDER: str(tmp_path)},
    )
    try:
        python(
            DOUBLE
            + """
    def value(name):
        return registry.get_sample_value(f"batched_{name}", {"function": "held"})

    names = "calls_total", "running_items", "waiting_items"
    while [value(name) for name in names] != [2, 1, 1]:
        time.sleep(0.01)
""",
            tmp_path,
        )
    finally:
        gate.touch()
        assert process.wait(60) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_counts_its_own_calls(tmp_path: Path) -> None:
    found = python(
        DOUBLE
        + """
    double(1), double(2)
    child = os.fork()
    if not child:
        double(3)
        assert double.stats.calls == 1
        sys.exit(0)  # writes the last counts
    os.waitpid(child, 0)
    print(calls())
""",
        tmp_path,
    )
    assert found == "3\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_calls_of_a_forked_process_go_on_without_the_folder(tmp_path: Path) -> None:
    found = python(
        DOUBLE
        + """
    double(1)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] += "/gone"
    child = os.fork()
    if not child:
        sys.exit(0 if double(3) == 6 else 1)
    print(os.waitpid(child, 0)[1])
""",
        tmp_path,
    )
    assert found == "0\n"


async def scrape(app: Any) -> str:
    """Return the page of an ASGI app."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert sent[0]["status"] == 200
    return b"".join(message.get("body", b"") for message in sent[1:]).decode()


def test_the_app_serves_all_metrics_of_one_process() -> None:
    app = batched.metrics.asgi_app()

    @batched.dynamically(name="on_page")
    def fn(items: list[int]) -> list[int]:
        return items

    fn(1)
    page = asyncio.run(scrape(app))
    assert 'batched_calls_total{function="on_page"} 1.0' in page
    assert "python_info" in page


def test_the_app_serves_the_metrics_of_all_processes(tmp_path: Path) -> None:
    python(DOUBLE + "    double(1), double(2)\n", tmp_path)
    found = python(
        DOUBLE
        + """
    import asyncio
    sys.path[:0] = FOLDERS
    from test_metrics import scrape
    from prometheus_client import Counter
    Counter("mine", "Of the user.").inc(4)
    app = batched.metrics.asgi_app()
    double(3)
    page = asyncio.run(scrape(app))
    assert 'batched_calls_total{function="double"} 3.0' in page, page
    assert "mine_total 4.0" in page, page
    print("right")
""".replace("FOLDERS", repr([str(Path(__file__).parent), *sys.path])),
        tmp_path,
    )
    assert found == "right\n"


def test_a_folder_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prometheus_client  # first: its values depend on the variable  # noqa: F401

    monkeypatch.setenv(counts.FOLDER, str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="MULTIPROC_DIR must name an empty folder that exi"):
        batched.metrics.prometheus()


def test_a_folder_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "sink", None)
    monkeypatch.setattr(counts, "daemon_thread", lambda *_: threading.Thread())
    file = counts.CountsFile(str(tmp_path / "absent"))
    file.close()
    file.close()
    assert caplog.text.count(f"could not be written to {tmp_path / 'absent'}") == 1


@pytest.mark.usefixtures("probed")
def test_opentelemetry_has_the_same_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_past", {})  # the SDK reports 2,000 functions at most
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    batched.metrics.opentelemetry(provider=provider)

    @batched.dynamically(length=len, name="measured")
    def fn(items: list[str]) -> list[int]:
        return [len(item) for item in items]

    with fn:
        assert fn(["a", "ab"]) == [1, 2]
    data: Any = reader.get_metrics_data()
    found: dict[str, list[Any]] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        points = metric.data.data_points
        found[metric.name] = [each for each in points if each.attributes["function"] == "measured"]
    names = {metric.name.removesuffix("_seconds") for metric in METRICS}
    assert set(found) == {f"batched.{name}" for name in names}
    assert sum(point.value for point in found["batched.batches"]) == 1
    assert found["batched.tokens"][0].value == 4
    (sizes,) = found["batched.batch_size"]
    assert (sizes.sum, sizes.count) == (2, 1)
    assert [found[f"batched.{name}"][0].count for name in ("queue_wait", "processing")] == [1, 1]
    provider.shutdown()


@pytest.fixture
def tracer(probed: None) -> Any:
    """Return a tracer of callers, and the list of ended spans; batches are traced."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    batched.tracing.opentelemetry(provider=provider)
    return provider.get_tracer("callers"), exporter


def check_links(spans: Any, callers: int) -> None:
    """Check that the one batch shows its callers, and each caller its batch."""
    (batch,) = [span for span in spans if span.name.startswith("batch ")]
    of_callers = {span.context.span_id: span for span in spans if span.name.startswith("caller ")}
    assert batch.parent is None
    assert len(of_callers) == callers
    assert {link.context.span_id for link in batch.links} == of_callers.keys()
    for span in of_callers.values():
        assert [link.context.span_id for link in span.links] == [batch.context.span_id]
    (inner,) = [span for span in spans if span.name == "inner"]
    assert inner.parent.span_id == batch.context.span_id
    assert batch.attributes["batched.batch.size"] == callers


@pytest.mark.parametrize("coroutine", [False, True])
def test_a_batch_shows_its_callers_and_each_caller_its_batch(tracer: Any, coroutine: bool) -> None:
    tracing, exporter = tracer
    fn: Any

    if coroutine:

        @batched.aio.dynamically(batch_size=3, name="traced", flush="window", timeout_ms=60_000)
        async def fn(items: list[int]) -> list[int]:
            with tracing.start_as_current_span("inner"):
                await asyncio.sleep(0)
            return items

    else:

        @batched.dynamically(batch_size=3, name="traced", flush="window", timeout_ms=60_000)
        def fn(items: list[int]) -> list[int]:
            with tracing.start_as_current_span("inner"):
                return items

    async def call(number: int) -> None:
        with tracing.start_as_current_span(f"caller {number}"):
            assert await fn.acall(number) == number

    async def main() -> None:
        await asyncio.gather(*map(call, range(3)))

    asyncio.run(main())
    check_links(exporter.get_finished_spans(), 3)


def test_a_span_tells_that_items_failed(tracer: Any) -> None:
    _, exporter = tracer

    @batched.dynamically(name="failing")
    def fn(items: list[int]) -> list[Any]:
        return [ValueError("odd") if item % 2 else item for item in items]

    with pytest.raises(ValueError, match="odd"):
        fn(1)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == "ValueError"
    assert span.status.description == "odd"


def test_callers_of_rows_that_join_are_linked_to_the_run(tracer: Any) -> None:
    tracing, exporter = tracer

    @batched.continuously(batch_size=4, name="stepping")
    def fn(rows: batched.Rows[int, int]) -> None:
        second = threading.Thread(target=call, args=(2,))
        second.start()
        end_together(rows, 2)

    def call(number: int) -> None:
        with tracing.start_as_current_span(f"caller {number}"):
            assert fn(number) == number

    call(1)
    fn.shutdown()
    spans = exporter.get_finished_spans()
    batches = [span for span in spans if span.name == "batch stepping"]
    callers = {span.context.span_id for span in spans if span.name.startswith("caller ")}
    assert {link.context.span_id for batch in batches for link in batch.links} >= callers


def test_a_failure_of_the_probe_affects_no_caller(
    caplog: pytest.LogCaptureFixture, tracer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe: Any = observer.probe

    @batched.dynamically(name="fine")
    def fn(items: list[int]) -> list[int]:
        return items

    monkeypatch.setattr(probe, "histograms", {"size": None})
    assert fn(1) == 1
    assert "the span of a batch of fine could not end" in caplog.text
    monkeypatch.setattr(probe, "tracer", object())
    assert fn(2) == 2
    assert "the span of a batch of fine could not begin" in caplog.text


def test_live_functions_are_listed_with_each_instance_that_was_called() -> None:
    class Model:
        @batched.dynamically
        def double(self, items: list[int]) -> list[int]:
            return [2 * item for item in items]

    @batched.dynamically
    def triple(items: list[int]) -> list[int]:
        return [3 * item for item in items]

    first, second = Model(), Model()
    first.double(1), second.double(2), second.double(3)
    mine = [fn for fn in batched.live() if fn in (triple, first.double, second.double)]
    assert sorted(fn.stats.calls for fn in mine) == [0, 1, 2]
    assert first.double in mine
    gone = second.double
    del second, mine, gone
    gc.collect()
    names = [fn.__name__ for fn in batched.live()]
    assert names.count("double") == 1
    del triple
    gc.collect()
    assert "triple" not in [fn.__name__ for fn in batched.live()]


def test_methods_of_a_class_are_listed_with_the_class_that_was_called() -> None:
    class Model:
        @batched.dynamically
        @classmethod
        def halve(cls, items: list[int]) -> list[float]:
            return [item / 2 for item in items]

    assert Model().halve(3) == 1.5
    for _ in range(2):
        (found,) = [fn for fn in batched.live() if fn.__name__ == "halve"]
        assert (found.stats.calls, found == Model.halve) == (1, True)


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = set(re.findall(r"\bbatched_\w+", json.dumps(board["panels"])))
    ends = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    known = {f"batched_{metric.name}{end}" for metric in METRICS for end in ends[metric.kind]}
    assert asked <= known
    labels = {"function", "le", *(metric.label for metric in METRICS)}
    grouped = re.findall(r"sum by \(([^)]*)\)", json.dumps(board["panels"]))
    assert {label.strip() for each in grouped for label in each.split(",")} <= labels


def test_every_metric_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    for metric in METRICS:
        name = f"batched_{metric.name}{'_total' if metric.kind == 'counter' else ''}"
        assert f"`{name}" in page, name
