"""Traces of all batched functions by OpenTelemetry; failures of those who watch harm nobody."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from countdowns import finish_all

import batched
import batched.tracing
from batched._runtime import observer

pytest.importorskip("opentelemetry.sdk")


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a tracer of callers, and the list of ended spans; batches are traced."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    monkeypatch.setattr(observer, "probe", None)
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    batched.tracing.opentelemetry(provider=provider)
    return provider.get_tracer("callers"), exporter


def test_a_batch_shows_its_callers_and_each_caller_its_batch(tracer: Any) -> None:
    tracing, exporter = tracer

    @batched.aio.dynamically(batch_size=3, flush="window", timeout_ms=60_000)
    async def fn(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        with tracing.start_as_current_span("inner"):
            return items

    async def call(number: int) -> None:
        with tracing.start_as_current_span(f"caller {number}"):
            assert await fn(number) == number

    async def main() -> None:
        await asyncio.gather(*map(call, range(3)))

    asyncio.run(main())
    spans = exporter.get_finished_spans()
    (batch,) = [span for span in spans if span.name.startswith("batch ")]
    of_callers = {span.context.span_id: span for span in spans if span.name.startswith("caller ")}
    assert batch.parent is None
    assert len(of_callers) == batch.attributes["batched.batch.size"] == 3
    assert {link.context.span_id for link in batch.links} == of_callers.keys()
    for span in of_callers.values():
        assert [link.context.span_id for link in span.links] == [batch.context.span_id]
    (inner,) = [span for span in spans if span.name == "inner"]
    assert inner.parent.span_id == batch.context.span_id


class Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("error", "text"), [(ValueError("odd"), "odd"), (Unprintable(), None)])
def test_an_error_ends_the_span(tracer: Any, error: Exception, text: str | None) -> None:
    @batched.dynamically
    def fn(items: list[int]) -> list[int]:
        raise error

    with fn, pytest.raises(type(error)):
        fn(1)
    (span,) = tracer[1].get_finished_spans()
    assert span.attributes["error.type"] == type(error).__name__
    assert (span.status.status_code.name, span.status.description) == ("ERROR", text)


def test_callers_of_rows_that_join_are_linked_to_the_run(tracer: Any) -> None:
    tracing, exporter = tracer

    @batched.continuously(batch_size=4, name="joined")
    def fn(rows: batched.Rows[int, int]) -> None:
        threading.Thread(target=call, args=(2,)).start()
        while rows:
            rows.join()
            if len(rows) == 2:
                finish_all(rows)
                rows.leave()

    def call(number: int) -> None:
        with tracing.start_as_current_span(f"caller {number}"):
            assert fn(number) == number

    call(1)
    fn.shutdown()
    spans = exporter.get_finished_spans()
    batches = [span for span in spans if span.name == "batch joined"]
    callers = {span.context.span_id for span in spans if span.name.startswith("caller ")}
    assert {link.context.span_id for batch in batches for link in batch.links} >= callers


def test_the_span_of_a_batch_ends_with_the_loop_that_runs_it(tracer: Any) -> None:
    _, exporter = tracer

    async def main() -> None:
        started = asyncio.Event()

        @batched.aio.dynamically(name="left")
        async def fn(items: list[int]) -> list[int]:
            started.set()
            await asyncio.Event().wait()
            return items

        call = asyncio.create_task(fn(1))
        await started.wait()
        assert not call.done()

    asyncio.run(main())
    assert [span.name for span in exporter.get_finished_spans()] == ["batch left"]


def test_a_tracer_and_a_meter_that_fail_harm_no_caller_and_are_logged_once(
    tracer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def get_tracer(self, *_: Any, **__: Any) -> Any:
            return self  # a tracer that starts no span

    def fail(*_: object) -> None:
        raise SystemExit

    batched.tracing.opentelemetry(provider=Failing())  # type: ignore[arg-type]
    monkeypatch.setattr(observer, "meters", [fail])
    with batched.dynamically(lambda items: items) as fn:
        assert [fn(1), fn(2)] == [1, 2]
    assert caplog.text.count("the span of a batch could not begin") == 1
    assert caplog.text.count("metrics could not be recorded") == 1
