"""How much does Ray cost a run, and what is the highest rate of its driver?

Run: python benchmarks/clusters.py [--check] [--quick] [--save]

The baselines are threads of this machine and Ray Data's `map_batches`, with results of several
sizes. There is one local cluster. Its start, and a first small run, are not measured.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from batched import offline
from offline import folder, texts, timed, write_rows
from report import Figure, Result, conclude, options

BATCH_SIZE = 64
SLEEP = 0.05
"""Time of a batch; overhead is a share of it (s)."""
WORKERS = 4
FIRST = 3.0
"""Longest time of a run of one batch (s)."""


@dataclass(frozen=True)
class Sizes:
    """Rows, batches and rounds of all measurements."""

    rounds: int = 5
    batches: int = 400
    rows: int = 200_000
    bounded: bool = True
    """Runs are long enough that their start and end are a small part of them."""


QUICK = Sizes(2, 100, 40_000, bounded=False)

NOTES = (
    f"{WORKERS} workers: threads, actors without CPUs of their own, or actors of Ray Data.",
    "What comes through the driver is computed by two actors that do nothing else.",
)


def sleep(items: list[str]) -> list[str]:
    time.sleep(SLEEP)
    return items


class Sleeper:
    """Function that sleeps, for Ray Data."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(SLEEP)
        return {**batch, "result": batch["text"]}


class Maker:
    """Function that returns rows of random numbers, which cannot be compressed."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.random = np.random.default_rng(0)

    def __call__(self, items: list[str]) -> Any:
        return self.random.random((len(items), self.width), np.float32)


def same(items: list[str]) -> list[str]:
    return items


Step = tuple[Callable[..., Any], dict[str, Any]]
"""A function, and the settings of its step."""


@dataclass(frozen=True)
class Pace:
    """Speed of a run, from its snapshots four times a second."""

    first: float
    """Time until rows were committed (s)."""
    rate: float
    """Rows a second after that moment."""


def paced(step: Step, source: Path, dest: Path, workers: int, engine: offline.Ray | None) -> Pace:
    func, settings = step
    told: list[tuple[float, int]] = []  # moments (s), and rows until then
    began = time.perf_counter()

    def note(snapshot: offline.Snapshot) -> None:
        if snapshot.ok:
            told.append((time.perf_counter(), snapshot.ok))

    offline.run(
        func,
        str(source),
        str(dest),
        **settings,
        input="text",
        output="result",
        key="id",
        version=1,
        batch_size=BATCH_SIZE,
        workers=workers,
        engine=engine,
        keep=["id"],
        watch=note,
    )
    if not told:  # all was committed before
        return Pace(math.inf, 0)
    (start, before), (end, after) = told[0], max(told, key=lambda each: (each[1], -each[0]))
    return Pace(start - began, (after - before) / max(end - start, 1e-9))


ON_RAY = offline.Ray(num_cpus=0)


def by_ray_data(source: Path, dest: Path) -> None:
    mapped = ray.data.read_parquet(str(source)).map_batches(
        Sleeper, batch_size=BATCH_SIZE, concurrency=WORKERS, num_cpus=0.1
    )
    mapped.write_parquet(str(dest))


def overhead_figures(home: Path, sizes: Sizes) -> list[Figure]:
    """Return the rows a second at 50 ms a batch."""
    rows, numbers = sizes.batches * BATCH_SIZE, itertools.count()
    source, few = home / "rows.parquet", home / "few.parquet"
    write_rows(source, texts(rows))
    write_rows(few, texts(BATCH_SIZE))

    by_ray_data(few, home / "warm")
    ours, threads, theirs, whole, first = [], [], [], [], []
    for _ in range(sizes.rounds):
        began = time.perf_counter()
        pace = paced((sleep, {}), source, home / f"{next(numbers)}.parquet", WORKERS, ON_RAY)
        whole.append(rows / (time.perf_counter() - began))
        ours.append(pace.rate)
        first.append(pace.first)
        pace = paced((sleep, {}), source, home / f"{next(numbers)}.parquet", WORKERS, None)
        threads.append(pace.rate)
        theirs.append(rows / timed(by_ray_data, source, home / f"{next(numbers)}"))
    name = f"{sizes.batches} batches of {1e3 * SLEEP:g} ms, {WORKERS} workers"
    least = 0.9 if sizes.bounded else None
    return [
        Figure(
            f"{name}, once warm",
            ours,
            "rows/s",
            Figure("threads", threads, "rows/s"),
            at_least=least,
        ),
        Figure(
            f"{name}, start and end included", whole, "rows/s", Figure("Ray Data", theirs, "rows/s")
        ),
        Figure("time to the first commit", first, "s", at_most=FIRST),
    ]


def driver_figures(home: Path, sizes: Sizes) -> list[Figure]:
    """Return the rows a second through the driver, relative to threads with the same work."""
    source = home / "all.parquet"
    write_rows(source, texts(sizes.rows))
    found = []
    kinds: dict[str, Step] = {
        "texts": (same, {}),
        "384 floats": (Maker, {"args": (384,)}),
        "1,024 floats": (Maker, {"args": (1024,)}),
    }
    for name, step in kinds.items():
        ours, threads = [], []
        for number in range(sizes.rounds):
            dest = home / f"{name}-{number}.parquet"
            ours.append(paced(step, source, dest, 2, ON_RAY).rate)
            threads.append(
                paced(step, source, dest.with_stem(f"{dest.stem}-threads"), 2, None).rate
            )
        baseline = Figure("threads", threads, "rows/s")
        found.append(Figure(f"{name} through the driver", ours, "rows/s", baseline))
    return found


def measure(sizes: Sizes) -> Result:
    ray.init(num_cpus=WORKERS, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        with folder() as home:
            figures = [*overhead_figures(home, sizes), *driver_figures(home, sizes)]
            return Result(figures, packages=("ray", "pyarrow"), notes=NOTES)
    finally:
        ray.shutdown()


def main() -> None:
    arguments = options(__doc__ or "")
    conclude(lambda: measure(QUICK if arguments.quick else Sizes()), arguments)


if __name__ == "__main__":
    main()
