"""Crash-safe runs of a batch function over a whole dataset.

One call reads the source, computes and writes the result::

    from batched import offline

    report = offline.run(
        embed, "reviews.csv", "vectors.parquet", input="text", output="vector", key="id"
    )

A committed row is never computed again, a bad row costs one row, and the result is one file. The
package needs the extra `offline`.
"""

from .._installation import needs

with needs("batched.offline", "offline"):
    from .batch_predictor import BatchPredictor
    from .engines.cluster import Ray
    from .pipeline import Pipeline, run
    from .report import DeadLetter, Report, Snapshot, StepCounts
    from .results.export import export
    from .retry import Retry
    from .sources.opening import explode
    from .sources.text import csv, jsonl
    from .step import Auto, Step

__all__ = [
    "Auto",
    "BatchPredictor",
    "DeadLetter",
    "Pipeline",
    "Ray",
    "Report",
    "Retry",
    "Snapshot",
    "Step",
    "StepCounts",
    "csv",
    "explode",
    "export",
    "jsonl",
    "run",
]
