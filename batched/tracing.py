"""Traces of batches, for OpenTelemetry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._installation import needs
from ._runtime import observer

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["opentelemetry"]


def opentelemetry(*, provider: TracerProvider | None = None) -> None:
    """Make a span for each batch of every batched function of this process.

    The tracer `batched` is of `provider`, by default the global one. The span of a batch, named
    `batch <function>`, is the root of a trace of its own, because the batch has many callers. It is
    linked to the span that was current where each call was made, and each of these spans is linked
    back to it. It is current while the function runs, so that spans of the function are within it.
    Attributes: ``code.function.name``, ``batched.batch.size``, ``batched.batch.flush_reason``,
    ``batched.batch.attempts``, and ``error.type`` if items have failed. A call of a function in a
    model process is not linked to the batch there. OpenTelemetry keeps 128 links of a span unless
    `OTEL_SPAN_LINK_COUNT_LIMIT` says otherwise.

    Raises:
        ImportError: OpenTelemetry is not installed.
    """
    with needs("batched.tracing.opentelemetry", "opentelemetry"):
        from opentelemetry.trace import get_tracer

    from ._operations.probe import Probe

    observer.probe = Probe(get_tracer("batched", tracer_provider=provider))
