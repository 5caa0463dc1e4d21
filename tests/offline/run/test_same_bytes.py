"""The same source, steps and values give the same bytes, however they were computed."""

from __future__ import annotations

import itertools
import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyarrow")

import numpy as np
import pyarrow.parquet as pq

import trial_runs
from trial_runs import ODD, WITHOUT
from trials import Trials

pytestmark = pytest.mark.once

ROWS: Final = 300
DESTS: Final = ("out.parquet", "out.jsonl", "out.csv", "out/")
FILES: Final = (*DESTS[:3], "out/part-00000.parquet")

Bytes = dict[str, bytes]
"""Files of the results, by name."""


@dataclass(frozen=True)
class Way:
    """A way to compute the same thing."""

    batch_size: int
    workers: int
    place: str
    killed: bool = False


PLACES: Final = ("threads", "coroutine", "processes")
REFERENCE: Final = Way(64, 1, "threads")
USUAL: Final = [Way(8, 4, "threads", killed=True), Way(64, 1, "processes")]
ALL: Final = [
    *itertools.starmap(Way, itertools.product((8, 64, 512), (1, 4), PLACES, (False, True))),
    *(Way(size, 2, "ray") for size in (8, 64, 512)),
]


@pytest.fixture(scope="module")
def reference(server: Trials, tmp_path_factory: pytest.TempPathFactory) -> Bytes:
    return computed(server, tmp_path_factory.mktemp("reference"), REFERENCE)


def computed(server: Trials, folder: Path, way: Way) -> Bytes:
    """Compute all results in a way, and return their bytes."""
    chance = random.Random(str(way))
    dests = [*DESTS]
    chance.shuffle(dests)  # any of them may be written first
    arguments: dict[str, Any] = {
        "count": ROWS,
        "dests": [f"{folder}/{dest}" for dest in dests],
        "progress": f"{folder}/progress",
        "log": f"{folder}/log",
        "batch_size": way.batch_size,
        "workers": way.workers,
        "place": way.place,
    }
    # functions in processes of their own count no calls here
    most = ROWS // way.batch_size * (1 if way.place == "processes" else 2)
    for _ in range(3 * way.killed):
        batch_size, workers = chance.choice([(8, 1), (64, 4), (512, 1)])
        sizes = {"batch_size": batch_size, "workers": workers}
        call = chance.randrange(1, max(2, most))
        ended = server.run("of_kinds", **{**arguments, **sizes}, kill_at_call=call)
        if ended.how == "done":  # before that call
            break
        assert ended.how == "killed", ended.lines
    ended = server.run("of_kinds", **arguments)
    assert ended.how == "done", ended.lines
    return {name: (folder / name).read_bytes() for name in FILES}


def test_the_result_holds_the_results_of_the_functions(reference: Bytes, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in reference["out.jsonl"].splitlines()]
    keys = [key for key in range(ROWS) if key != WITHOUT]
    assert [row["id"] for row in rows] == keys
    plain = trial_runs.kinds(keys, os.devnull)
    for row, values in zip(rows, plain, strict=True):
        expected = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        assert {name: row[name] for name in expected} == expected
        assert type(row["number"]) is type(values["number"])
        assert row["seen"].startswith(f"int:{row['id']} {type(row['number']).__name__}:")
    (tmp_path / "out.parquet").write_bytes(reference["out.parquet"])
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["id"].to_pylist() == [key for key in keys if key != ODD]
    assert str(table.schema.field("number").type) == "double"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "way", [*USUAL, *(pytest.param(way, marks=pytest.mark.slow) for way in ALL)], ids=str
)
def test_each_way_gives_the_same_bytes(
    server: Trials, reference: Bytes, tmp_path: Path, way: Way
) -> None:
    if way.place == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    found = computed(server, tmp_path, way)
    assert not [name for name in FILES if found[name] != reference[name]]
