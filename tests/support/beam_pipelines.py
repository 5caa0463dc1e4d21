"""Pipelines of Beam that record their results, on the direct runner in this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelMetadata, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

RUNNER = "FnApiRunner"
"""The direct runner for batches, if no other runner is installed."""

SEEN: defaultdict[str, list[Any]] = defaultdict(list)
"""Values by topic, recorded by functions of the last pipeline. Pipelines refer to the functions of
a test module by name, so that each function has one copy.
"""


def record(topic: str, value: Any) -> None:
    SEEN[topic].append(value)


@dataclass(frozen=True)
class Outcome:
    results: list[Any]
    failed_before: list[list[Any]]
    """Dead letters of each function before inference."""
    failed_batches: list[Any]
    failed_after: list[list[Any]]
    """Dead letters of each function after inference."""
    counters: dict[str, int]
    """Counters of Beam's namespace for inference, by name."""


def run(
    handler: Any, items: Iterable[Any], *, update: str = "", timeout: int | None = None
) -> Outcome:
    SEEN.clear()
    pipeline = beam.Pipeline(RUNNER, PipelineOptions([]))
    models = pipeline | "models" >> beam.Create([ModelMetadata(update, "new")]) if update else None
    inference = RunInference(handler, model_metadata_pcoll=models)
    rows = pipeline | beam.Create(list(items), reshuffle=False)
    results, dead = rows | inference.with_exception_handling(timeout=timeout)
    topics = {"results": results, "failed batches": dead.failed_inferences}
    for place in ("before", "after"):
        fns = dead.failed_preprocessing if place == "before" else dead.failed_postprocessing
        topics |= {f"failed {place} {number}": rows for number, rows in enumerate(fns)}
    for topic, rows in topics.items():
        rows | f"record {topic}" >> beam.Map(partial(record, topic))
    ended = pipeline.run()
    ended.wait_until_finish()
    return Outcome(
        SEEN["results"],
        [SEEN[topic] for topic in topics if topic.startswith("failed before")],
        SEEN["failed batches"],
        [SEEN[topic] for topic in topics if topic.startswith("failed after")],
        {
            counter.key.metric.name: counter.committed
            for counter in ended.metrics().query()["counters"]
        },
    )
