"""How long would 10^9 rows take on a cluster, and what is its first limit?

Run: python benchmarks/at_scale.py [--rows 1e9] [--gpus 64] [--per-gpu 2000] [--save]

The rates of the parts of a run are measured on this machine, all with the same rows: texts whose
results are vectors of 384 floats. One process does the work of a driver, however many actors there
are. The times on a cluster follow from these rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from clusters import ON_RAY, Maker, paced

from offline import folder, texts, timed, write_rows
from report import Figure, Result, conclude, parser

ROWS = 200_000
"""Rows for the measurement of each part."""
QUICK = 40_000
WIDTH = 384
HOUR = 3600.0


@dataclass(frozen=True)
class Rates:
    """Rates of one driver on this machine."""

    through: float
    """Rows a second from actors to the progress file."""
    resumed: float
    """Rows a second of a run whose rows are all committed."""
    merged: float
    """Rows a second while the result is written."""
    stored: float
    """Bytes of a row in the progress file."""
    resulting: float
    """Bytes of a row in the result."""


def measured(home: Path, rows: int) -> Rates:
    source, dest = home / "rows.parquet", home / "out.parquet"
    write_rows(source, texts(rows))
    step = Maker, {"args": (WIDTH,)}
    ray.init(num_cpus=2, logging_level="ERROR", log_to_driver=False)
    try:
        through = paced(step, source, dest, 2, ON_RAY).rate
    finally:
        ray.shutdown()

    def again() -> None:
        paced(step, source, dest, 2, None)

    stored, resulting = (path.stat().st_size / rows for path in (Path(f"{dest}.progress"), dest))
    found = timed(again)
    dest.unlink()
    with_merge = timed(again)
    return Rates(through, rows / found, rows / (with_merge - found), stored, resulting)


@dataclass(frozen=True)
class Plan:
    """Rows on GPUs, in a number of runs, each with a driver of its own."""

    rows: float
    gpus: int
    per_gpu: float
    """Rows a second of one GPU."""
    runs: int = 1

    def figures(self, rates: Rates) -> list[Figure]:
        share = self.rows / self.runs
        computing = self.rows / (self.gpus * self.per_gpu) / HOUR
        driving = share / rates.through / HOUR
        hours = {
            "GPUs compute": computing,
            "a driver takes results and commits them": driving,
            "rows are under way, the longer of both": max(computing, driving),
            "a result is written, once all is committed": share / rates.merged / HOUR,
            "a killed run reads and looks up all rows": share / rates.resumed / HOUR,
        }
        terabytes = {
            "progress file of a run": share * rates.stored / 1e12,
            "result of a run": share * rates.resulting / 1e12,
        }
        title = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        return [
            *(Figure(f"{title}: {name}", [value], "h") for name, value in hours.items()),
            *(Figure(f"{title}: {name}", [value], "TB") for name, value in terabytes.items()),
        ]

    def enough(self, rates: Rates) -> int:
        """Return the number of simultaneous runs from which on the GPUs are the slowest part."""
        return math.ceil(self.gpus * self.per_gpu / rates.through)


def result(plan: Plan, rows: int) -> Result:
    with folder() as home:
        rates = measured(home, rows)
    alone = [
        Figure("rows through a driver", [rates.through], "rows/s"),
        Figure("rows that a run finds committed", [rates.resumed], "rows/s"),
        Figure("rows written to a result", [rates.merged], "rows/s"),
        Figure("a row in the progress file", [rates.stored], "bytes"),
        Figure("a row of the result", [rates.resulting], "bytes"),
    ]
    several = replace(plan, runs=plan.enough(rates))
    notes = (
        f"{plan.rows:,.0f} rows, {plan.gpus} GPUs of {plan.per_gpu:,.0f} rows/s each.",
        "A run has a driver, a progress file and a result of its own.",
        f"Results are vectors of {WIDTH} floats. Actors and driver shared the cores.",
    )
    figures = [*alone, *plan.figures(rates), *several.figures(rates)]
    return Result(figures, packages=("ray", "pyarrow"), notes=notes)


def main() -> None:
    command = parser(__doc__ or "")
    command.add_argument("--rows", type=float, default=1e9)
    command.add_argument("--gpus", type=int, default=64)
    command.add_argument("--per-gpu", type=float, default=2000, help="rows a second")
    arguments = command.parse_args()
    plan = Plan(arguments.rows, arguments.gpus, arguments.per_gpu)
    conclude(lambda: result(plan, QUICK if arguments.quick else ROWS), arguments)


if __name__ == "__main__":
    main()
