"""Spans of OpenTelemetry for each batch of any function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, StatusCode

from .._core.scheduler import Batch
from .._execution.attempts import Outcomes
from .._runtime.notices import LogOnce

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


class Probe:
    """Probe that makes spans."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @LogOnce("the span of a caller could not be found")
    def origin(self) -> Span:
        """Return the span of the caller."""
        return trace.get_current_span()

    @LogOnce("the span of a batch could not begin")
    def began(self, name: str, batch: Batch) -> tuple[Span, Any]:
        """Begin the span of a batch, and make it current.

        Return it with the token of the context that was current before.
        """
        span = self._tracer.start_span(
            f"batch {name}",
            context.Context(),  # a trace of its own: callers have one each
            SpanKind.INTERNAL,
            {
                "code.function.name": name,
                "batched.batch.size": batch.size,
                "batched.batch.flush_reason": batch.reason,
            },
        )
        self._link(span, batch)
        return span, context.attach(trace.set_span_in_context(span))

    def run(self, batch: Batch, runtime: Any) -> Outcomes:
        """Run `batch` in this thread, as the execution of `runtime` does."""
        began = self.began(runtime.name, batch)
        outcomes: Outcomes = runtime.execution.run(batch, runtime)
        self.ended(began, batch, outcomes)
        return outcomes

    async def run_async(self, batch: Batch, runtime: Any) -> Outcomes:
        """Run `batch` in this task, as the execution of `runtime` does."""
        began, outcomes = self.began(runtime.name, batch), None
        try:
            outcomes = await runtime.execution.run_async(batch, runtime)
        finally:  # also if its loop ends
            self.ended(began, batch, outcomes)
        return outcomes  # type: ignore[no-any-return]  # `runtime` has no type here

    def joined(self, batch: Batch) -> None:
        """Link the callers of rows that join a run to its span."""
        self._link(trace.get_current_span(), batch)

    @LogOnce("the span of a batch could not tell how it ended")
    def ended(self, began: Any, batch: Batch, outcomes: Any) -> None:
        """End the span of a batch, if it could begin."""
        if began is None:
            return
        span, token = began
        try:
            span.set_attribute("batched.batch.attempts", batch.attempts)
            # `__class__` may be user code
            results = outcomes[1] if outcomes else ()
            errors = [part for part in results if issubclass(type(part), BaseException)]
            if errors:
                span.set_status(StatusCode.ERROR)
                span.set_attribute("error.type", type(errors[0]).__qualname__)
                span.set_status(StatusCode.ERROR, str(errors[0])[:200])
        finally:
            context.detach(token)
            span.end()

    @LogOnce("callers could not be linked to a batch")
    def _link(self, span: Span, batch: Batch) -> None:
        """Link a span to the spans of the callers of a batch, and these spans to it."""
        for caller in {request.origin: None for request, _, _ in batch.slices}:
            if caller is not None and caller.get_span_context().is_valid:
                span.add_link(caller.get_span_context())
                if caller.is_recording():  # else its caller has given up
                    caller.add_link(span.get_span_context())
