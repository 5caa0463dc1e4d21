"""Spans and histograms of OpenTelemetry for each batch of any function."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, StatusCode

from .._core.scheduler import Batch
from .._execution.attempts import Outcomes
from .._runtime import observer
from .._runtime.wakers import log_failure

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_Began = tuple[float, "Span | None", Any]
"""Begin of a batch (s), its span, and the token of the context that was current before it."""


class Probe(observer.Probe):
    """Probe that makes spans, fills histograms, or does both. Its failures affect no caller."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self.histograms: Mapping[str, Any] = {}

    def origin(self) -> Span | None:
        """Return the span of the caller."""
        return trace.get_current_span() if self.tracer is not None else None

    def began(self, name: str, batch: Batch) -> _Began | None:
        """Begin the span of a batch, and make it current."""
        try:
            span = token = None
            if self.tracer is not None:
                span = self.tracer.start_span(
                    f"batch {name}",
                    context.Context(),  # a trace of its own: callers have one each
                    SpanKind.INTERNAL,
                    {
                        "code.function.name": name,
                        "batched.batch.size": batch.size,
                        "batched.batch.flush_reason": batch.reason,
                    },
                )
                token = context.attach(trace.set_span_in_context(span))
                self._link(span, batch)
            return time.perf_counter(), span, token
        except Exception:
            log_failure("the span of a batch of %s could not begin", name)
            return None

    def joined(self, name: str, batch: Batch) -> None:
        """Link the callers of rows that join a run to its span."""
        try:
            if self.tracer is not None:
                self._link(trace.get_current_span(), batch)
        except Exception:
            log_failure("callers could not be linked to a batch of %s", name)

    def ended(self, began: Any, name: str, batch: Batch, outcomes: Outcomes) -> None:
        """End the span of a batch, and add the batch to the histograms."""
        try:
            begin, span, token = began
            if span is not None:
                errors = [part for part in outcomes[1] if isinstance(part, BaseException)]
                span.set_attribute("batched.batch.attempts", batch.attempts)
                if errors:
                    span.set_attribute("error.type", type(errors[0]).__qualname__)
                    span.set_status(StatusCode.ERROR, str(errors[0])[:200])
                context.detach(token)
                span.end()
            found = {"wait": batch.waits, "processing": (time.perf_counter() - begin,)}
            found["size"] = (batch.size,)
            for key, histogram in self.histograms.items():
                for value in found[key]:
                    histogram.record(value, {"function": name})
        except Exception:
            log_failure("the span of a batch of %s could not end", name)

    def _link(self, span: Span, batch: Batch) -> None:
        """Link a span to the spans of the callers of a batch, and these spans to it."""
        callers = {request.origin: None for request, _, _ in batch.slices}
        for caller in callers:
            if caller is not None and caller.get_span_context().is_valid:
                span.add_link(caller.get_span_context())
                if caller.is_recording():  # else its caller has given up
                    caller.add_link(span.get_span_context())


def _probe() -> Probe:
    """Return the probe of this process."""
    if not isinstance(observer.probe, Probe):
        observer.probe = Probe()
    return observer.probe


def record_batches(histograms: Mapping[str, Any]) -> None:
    """Fill histograms, by the keys of metrics, with each batch from now on."""
    _probe().histograms = histograms


def trace_batches(tracer: Tracer) -> None:
    """Make a span for each batch from now on."""
    _probe().tracer = tracer
