"""Bad rows: however they are bad, however many and wherever they stand, each costs one row, and the
run ends in a result.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from batched import offline

pytestmark = pytest.mark.once

TIMEOUT_S: Final = 0.5
"""Time limit of a call (s). No good call waits for anything, so that none comes near it."""
RETRY: Final = offline.Retry(attempts=3, wait_initial=0.002, wait_max=0.01, wait_jitter=0.002)

Way = Literal["raises", "service", "answers", "time limit", "unstorable", "unreadable"]
Place = Literal["start", "end", "spread"]

WAYS: Final[dict[Way, str]] = {
    "raises": "inference",  # the call of its batch raises ValueError
    "service": "inference",  # the call of its batch raises ConnectionError, each time
    "answers": "inference",  # the list of results has a ConnectionError in its place, each time
    "time limit": "inference",  # the call of its batch never ends
    "unstorable": "output",  # its result is an object
    "unreadable": "source",  # its line is no JSON
}
"""Ways to be bad, and the phase of the dead letter."""


def function_of(way: Way, bad: set[int], sizes: list[int]) -> Callable[[list[int]], Any]:
    """Return a batch function for which some rows are bad. It notes the sizes of its batches, and
    is a coroutine function if there is a time limit.
    """

    def result(key: int) -> Any:
        if key not in bad:
            return key / 2
        return ConnectionError("no answer") if way == "answers" else object()

    def plain(keys: list[int]) -> list[Any]:
        sizes.append(len(keys))
        if way == "raises" and bad.intersection(keys):
            raise ValueError("bad row")
        if way == "service" and bad.intersection(keys):
            raise ConnectionError("no answer for this row")
        return [result(key) for key in keys]

    async def limited(keys: list[int]) -> list[Any]:
        sizes.append(len(keys))
        if bad.intersection(keys):
            await asyncio.Event().wait()
        return [result(key) for key in keys]

    return limited if way == "time limit" else plain


def check(
    folder: Path,
    way: Way,
    count: int,
    place: Place,
    workers: int,
    rows: int = 1000,
    batch_size: int = 32,
    seed: int = 1,
) -> None:
    """Run with `count` bad rows, and look at its result, its dead letters and the calls that it
    took. Run once more: nothing but the bad rows is computed, and the run ends in the same way.
    """
    print(f"\n{way}, {count} at {place}, {workers} workers, seed {seed}")
    keys = range(rows)
    at: dict[Place, Any] = {"start": keys[:count], "end": keys[-count:]}
    bad = {*at.get(place, random.Random(seed).sample(keys, count))}
    # calls without bad rows, eleven to find one row of 32, and a few to see that it works; a row
    # that its service refuses is called three times before
    narrowed = 10 * (way in ("raises", "service", "time limit"))
    refused = RETRY.attempts * (way in ("service", "answers"))
    most_calls = rows // batch_size + (narrowed + refused) * count + 24
    source, dest = folder / "in.jsonl", folder / "out.jsonl"
    lines = [json.dumps({"id": key, "text": f"row {key}"}) for key in keys]
    if way == "unreadable":
        lines = [line[:-3] if key in bad else line for key, line in enumerate(lines)]
    source.write_text("\n".join(lines) + "\n")
    sizes: list[int] = []

    def run() -> offline.Report:
        return offline.run(
            function_of(way, bad, sizes),
            source,
            dest,
            input="id",
            output="half",
            key="id",
            version=1,
            batch_size=batch_size,
            workers=workers,
            retry=RETRY,
            timeout_s=TIMEOUT_S if way == "time limit" else None,
            watch=False,
        )

    report = run()
    assert len(sizes) <= most_calls
    result = dest.read_bytes()
    good = [{"id": key, "text": f"row {key}", "half": key / 2} for key in keys if key not in bad]
    assert [json.loads(line) for line in result.splitlines()] == good
    letters = list(report.dead_letters())
    assert len(letters) == count
    assert {letter["key"] for letter in letters} == bad  # keys are the numbers of rows
    assert {letter["phase"] for letter in letters} == {WAYS[way]}
    assert (report.ok, report.failed, report.skipped) == (rows - count, count, 0)
    again = run()
    assert (again.ok, again.failed, again.skipped) == (0, count, report.ok)
    assert len(list(again.dead_letters())) == count
    assert dest.read_bytes() == result


@pytest.mark.parametrize(
    ("count", "place", "workers"),
    [(1, "end", 1), (7, "spread", 8), (50, "start", 1), (2, "end", 8)],
)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "time limit"])
def test_bad_rows_cost_themselves(
    tmp_path: Path, way: Way, count: int, place: Place, workers: int
) -> None:
    check(tmp_path, way, count, place, workers)


@pytest.mark.parametrize("place", ["start", "end"])
def test_rows_beyond_the_time_limit_cost_themselves(tmp_path: Path, place: Place) -> None:
    check(tmp_path, "time limit", 1, place, 8, rows=40, batch_size=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("place", ["start", "end", "spread"])
@pytest.mark.parametrize("count", [1, 2, 7, 50])
@pytest.mark.parametrize("way", WAYS)
def test_bad_rows_cost_themselves_in_all_cases(
    tmp_path: Path, way: Way, count: int, place: Place, workers: int
) -> None:
    check(tmp_path, way, count, place, workers, seed=random.randrange(10**6))


def test_results_that_are_missing_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def even(numbers: list[int]) -> list[int]:
        return [number for number in numbers if number % 2 == 0]

    rows = [{"number": number} for number in range(64)]
    settings: dict[str, Any] = {"input": "number", "output": "even", "batch_size": 8}
    report = offline.run(even, rows, tmp_path / "r.jsonl", **settings)
    assert (report.ok, report.failed) == (32, 32)
    told = [each for each in caplog.messages if each.startswith("step 'even': even was given 8")]
    assert [each.partition("returned ")[2][:9] for each in told] == ["4 results"]
