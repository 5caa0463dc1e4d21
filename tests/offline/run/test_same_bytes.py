"""The same source, steps and values give the same bytes, however they were computed, and though
runs were killed at any moment.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

import trial_runs
from stage import wait_until
from trial_runs import ODD, WITHOUT, committed_in, computed_again
from trials import Ended, Trials

pytestmark = pytest.mark.once

ROWS: Final = 300
MORE_ROWS: Final = 1500
"""Rows of a run that is long enough to be killed in its midst."""
DESTS: Final = ("out.parquet", "out.jsonl", "out.csv", "out/")
FILES: Final = (*DESTS[:3], "out/part-00000.parquet")


class Way(NamedTuple):
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
def reference(server: Trials, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return computed(server, tmp_path_factory.mktemp("reference"), REFERENCE)


def computed(server: Trials, folder: Path, way: Way) -> dict[str, bytes]:
    """Compute all results in a way, and return their bytes."""
    chance = random.Random(str(way))
    arguments: dict[str, Any] = {
        "count": ROWS,
        "dests": [f"{folder}/{dest}" for dest in chance.sample(DESTS, 4)],  # in any order
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


def test_the_result_holds_the_results_of_the_functions(
    reference: dict[str, bytes], tmp_path: Path
) -> None:
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
    server: Trials, reference: dict[str, bytes], tmp_path: Path, way: Way
) -> None:
    if way.place == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    found = computed(server, tmp_path, way)
    assert not [name for name in FILES if found[name] != reference[name]]


def killed(place: str, times: int) -> Any:
    return pytest.param(place, times, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(
    ("place", "times"),
    [
        pytest.param("threads", 2, marks=pytest.mark.timeout(120)),
        *(killed(place, 100) for place in PLACES),
        killed("ray", 20),
    ],
)
def test_a_killed_run_goes_on_loses_nothing_and_computes_nothing_twice(
    server: Trials, tmp_path: Path, place: str, times: int
) -> None:
    if place == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    log = tmp_path / "log"
    seed = random.randrange(10**6)
    print(f"\n{place}: {times} SIGKILLs, seed {seed}")
    chance = random.Random(seed)

    def run(dest: Path, kill_after_s: float | None = None) -> Ended:
        log.unlink(missing_ok=True)
        return server.run(
            "of_kinds",
            kill_after_s=kill_after_s,
            count=MORE_ROWS,
            dests=[str(dest)],
            progress=f"{dest}.progress",
            log=str(log),
            batch_size=chance.choice([16, 33, 64, 128]),
            workers=chance.choice([1, 2, 3]),
            place=place,
        )

    whole = tmp_path / "whole.parquet"
    undisturbed = run(whole)
    assert undisturbed.how == "done", undisturbed.lines
    kills = ends = 0
    while kills < times:
        dest = tmp_path / f"{ends}.parquet"
        progress = Path(f"{dest}.progress")
        before = committed_in(progress)
        moment = chance.uniform(undisturbed.result["started_s"], 1.2 * undisturbed.seconds)
        ended = run(dest, moment)
        again = computed_again(log, {row for row, status in before.items() if status == "ok"})
        assert not again, f"computed again: {again[:5]}"
        if ended.how == "killed":
            kills += 1
            if place != "ray":  # processes of Ray may outlive their driver for a minute
                wait_until(lambda: not server.leftovers())
            lost = set(before) - set(committed_in(progress))
            assert not lost, f"lost: {sorted(lost)[:5]}"
            if kills < times:
                continue
            ended = run(dest)
        assert ended.how == "done", f"{ended.error}\n{ended.lines}"
        assert dest.read_bytes() == whole.read_bytes(), "another result"
        assert ended.result["letters"] == undisturbed.result["letters"]
        ends += 1
