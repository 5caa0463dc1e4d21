"""The same batch function over a dataset, crash-safe to the row.

    from batched import offline

    report = offline.run(
        embed, "reviews.csv", "vectors.parquet", input="text", output="vector", key="id"
    )

What was committed is never computed again, one bad row costs one row, and the result is one file.
It needs the extra `offline`.
"""

from ._batch_predictor import BatchPredictor
from ._pipeline import Pipeline, run
from ._report import DeadLetter, Report, Snapshot, StepCounts
from ._retry import Retry
from ._step import Auto, Step

__all__ = [
    "Auto",
    "BatchPredictor",
    "DeadLetter",
    "Pipeline",
    "Report",
    "Retry",
    "Snapshot",
    "Step",
    "StepCounts",
    "run",
]
