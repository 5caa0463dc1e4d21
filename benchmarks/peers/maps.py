"""Maps of a function over a Parquet file to another Parquet file, one for each library.

Run: python -m peers.maps LIBRARY SOURCE DEST MARKS SMALL

MARKS is the file to which each batch adds its number of rows. SMALL is another source, for warming
up. The program prints the time of the map (s). The function takes 64 texts at once and sleeps 5 ms;
one batch runs at a time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH_SIZE = 64
SECONDS = 0.005
"""Time of the function for one batch (s)."""

MARKS = "MARKS"
"""Environment variable that names the file of marks. Libraries that compare the arguments of a
function must not see different files.
"""
Map = Callable[[str, str], object]
"""Reads SOURCE, and writes DEST."""


def upper(texts: list[str], marks: str | None = None) -> list[str]:
    """Return the texts in upper case, and mark the batch."""
    time.sleep(SECONDS)
    with open(marks or os.environ[MARKS], "a", encoding="utf-8") as file:
        file.write(f"{len(texts)}\n")
    return [text.upper() for text in texts]


def marked(marks: Path) -> int:
    """Return the number of computed rows, by their marks."""
    return sum(map(int, marks.read_text().split())) if marks.exists() else 0


def by_batched() -> Map:
    from batched import offline

    def run(source: str, dest: str) -> None:
        offline.run(
            upper,
            source,
            f"{dest}.parquet",
            input="text",
            output="upper",
            key="id",
            batch_size=BATCH_SIZE,
            watch=False,
        )

    return run


def by_datasets() -> Map:
    import datasets

    datasets.disable_progress_bars()

    def run(source: str, dest: str) -> None:
        read = datasets.Dataset.from_parquet(source, cache_dir=f"{dest}.cache")
        made = read.map(
            lambda rows: {"upper": upper(rows["text"])}, batched=True, batch_size=BATCH_SIZE
        )
        made.to_parquet(f"{dest}.parquet")

    return run


def by_polars() -> Map:
    import polars

    one_batch = threading.Lock()  # as a model would need it

    def run(source: str, dest: str) -> None:
        def whole(frame: Any) -> Any:
            with one_batch:
                parts = [
                    part.with_columns(upper=polars.Series(upper(part["text"].to_list())))
                    for part in frame.iter_slices(BATCH_SIZE)
                ]
            return polars.concat(parts)

        schema = {"id": polars.String, "text": polars.String, "upper": polars.String}
        made = polars.scan_parquet(source).map_batches(whole, schema=schema, streamable=True)
        made.sink_parquet(f"{dest}.parquet")

    return run


class Upper:
    """The function, for an actor."""

    def __init__(self, marks: str) -> None:
        self._marks = marks

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "upper": upper(list(rows["text"]), self._marks)}


def by_ray() -> Map:
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"})
    import ray  # it reads the line above
    import ray.data

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def run(source: str, dest: str) -> None:
        read = ray.data.read_parquet(source)
        made = read.map_batches(
            Upper,
            fn_constructor_args=(os.environ[MARKS],),
            batch_size=BATCH_SIZE,
            compute=ray.data.ActorPoolStrategy(size=1),
        )
        made.write_parquet(dest)

    return run


LIBRARIES = {
    "batched": by_batched,
    "datasets": by_datasets,
    "polars": by_polars,
    "ray": by_ray,
}


def main(library: str, source: str, dest: str, marks: str, small: str) -> None:
    run = LIBRARIES[library]()
    os.environ[MARKS] = os.devnull
    run(small, f"{dest}-small")
    os.environ[MARKS] = marks
    began = time.perf_counter()
    run(source, dest)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
