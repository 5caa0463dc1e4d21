"""Bad rows: however they are bad, however many and wherever they stand, each costs one row, and the
run ends in a result.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import pytest

pytest.importorskip("pyarrow")

from batched import offline

pytestmark = pytest.mark.once

ROWS: Final = 1000
BATCH: Final = 32
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


@dataclass
class Model:
    """A batch function for which some rows are bad; it counts."""

    way: Way
    bad: frozenset[int]
    calls: int = 0
    rows: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, keys: list[int]) -> None:
        with self.lock:
            self.calls += 1
            self.rows += len(keys)

    def results(self, keys: list[int]) -> list[Any]:
        bad = self.bad.intersection(keys)
        if bad and self.way == "raises":
            raise ValueError("bad row")
        if bad and self.way == "service":
            raise ConnectionError("no answer for this row")
        return [self.result(key) for key in keys]

    def result(self, key: int) -> Any:
        if key not in self.bad:
            return key / 2
        return ConnectionError("no answer") if self.way == "answers" else object()

    def function(self) -> Callable[[list[int]], Any]:
        """Return the batch function, which is a coroutine function if there is a time limit."""

        def plain(keys: list[int]) -> list[Any]:
            self.count(keys)
            return self.results(keys)

        async def limited(keys: list[int]) -> list[Any]:
            self.count(keys)
            if self.bad.intersection(keys):
                await asyncio.Event().wait()
            return [key / 2 for key in keys]

        return limited if self.way == "time limit" else plain


@dataclass(frozen=True)
class Case:
    """Bad rows of one kind among many."""

    way: Way
    count: int
    place: Place
    workers: int
    rows: int = ROWS
    batch_size: int = BATCH

    def bad(self, chance: random.Random) -> frozenset[int]:
        if self.place == "start":
            return frozenset(range(self.count))
        if self.place == "end":
            return frozenset(range(self.rows - self.count, self.rows))
        return frozenset(chance.sample(range(self.rows), self.count))

    def write(self, path: Path, bad: frozenset[int]) -> None:
        lines = [json.dumps({"id": key, "text": f"row {key}"}) for key in range(self.rows)]
        if self.way == "unreadable":
            lines = [line[:-3] if key in bad else line for key, line in enumerate(lines)]
        path.write_text("\n".join(lines) + "\n")

    def run(self, model: Model, source: Path, dest: Path) -> offline.Report:
        return offline.run(
            model.function(),
            source,
            dest,
            input="id",
            output="half",
            key="id",
            version=1,
            batch_size=self.batch_size,
            workers=self.workers,
            retry=RETRY,
            timeout_s=TIMEOUT_S if self.way == "time limit" else None,
            watch=False,
        )

    @property
    def most_calls(self) -> int:
        """Calls without bad rows, eleven to find one row of 32, and a few to see that it works.

        A row that its service refuses is called three times before.
        """
        narrowed = self.way in ("raises", "service", "time limit")
        again = 10 * narrowed + RETRY.attempts * (self.way in ("service", "answers"))
        return self.rows // self.batch_size + again * self.count + 12

    @property
    def most_rows(self) -> int:
        """Rows in these calls: twice a batch to find one row of it."""
        calls = RETRY.attempts if self.way in ("service", "answers") else 1
        return self.rows + (1 + calls) * self.batch_size * self.count + 2 * self.batch_size


def key_of(letter: offline.DeadLetter) -> int:
    """Key of a dead letter; of a row that cannot be read, by the line that its error names."""
    if letter["phase"] != "source":
        assert isinstance(letter["key"], int)
        return letter["key"]
    line = re.search(r"line (\d+)", letter["error"])
    assert line
    return int(line[1]) - 1


def check(case: Case, folder: Path, seed: int) -> tuple[Model, offline.Report]:
    """Run a case, and look at its result, its dead letters and the calls that it took."""
    print(f"\n{case}, seed {seed}")
    bad = case.bad(random.Random(seed))
    model = Model(case.way, bad)
    source, dest = folder / "in.jsonl", folder / "out.jsonl"
    case.write(source, bad)
    report = case.run(model, source, dest)
    found = [json.loads(line) for line in dest.read_text().splitlines()]
    assert [row["id"] for row in found] == [key for key in range(case.rows) if key not in bad]
    assert all(row["half"] == row["id"] / 2 for row in found)
    letters = list(report.dead_letters())
    assert sorted(map(key_of, letters)) == sorted(bad)
    assert {letter["phase"] for letter in letters} == {WAYS[case.way]}
    assert (report.ok, report.failed, report.skipped) == (case.rows - case.count, case.count, 0)
    print(
        f"{model.calls} calls of {model.rows} rows; at most {case.most_calls} calls of "
        f"{case.most_rows} rows are allowed"
    )
    assert model.calls <= case.most_calls
    assert model.rows <= case.most_rows
    return model, report


def again(case: Case, folder: Path, model: Model, report: offline.Report) -> None:
    """Run it once more: nothing but the bad rows is computed, and the run ends in the same way."""
    result = Path(report.output).read_bytes()
    model.calls = model.rows = 0
    second = case.run(model, folder / "in.jsonl", Path(report.output))
    assert (second.ok, second.failed, second.skipped) == (0, case.count, report.ok)
    assert len(list(second.dead_letters())) == case.count
    assert Path(report.output).read_bytes() == result


USUAL: Final[list[tuple[int, Place, int]]] = [
    (1, "end", 1),
    (7, "spread", 8),
    (50, "start", 1),
    (2, "end", 8),
]
COMMON: Final = [
    Case(way, count, place, workers)
    for way in WAYS
    if way != "time limit"
    for count, place, workers in USUAL
]


@pytest.mark.parametrize(
    "case",
    COMMON,
    ids=lambda case: f"{case.way}-{case.count}-{case.place}-{case.workers}",
)
def test_bad_rows_cost_themselves(tmp_path: Path, case: Case) -> None:
    model, report = check(case, tmp_path, seed=1)
    again(case, tmp_path, model, report)


@pytest.mark.parametrize("place", ["start", "end"])
def test_rows_beyond_the_time_limit_cost_themselves(tmp_path: Path, place: Place) -> None:
    check(Case("time limit", 1, place, 8, rows=40, batch_size=4), tmp_path, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("place", ["start", "end", "spread"])
@pytest.mark.parametrize("count", [1, 2, 7, 50])
@pytest.mark.parametrize("way", WAYS)
def test_bad_rows_cost_themselves_in_all_cases(
    tmp_path: Path, way: Way, count: int, place: Place, workers: int
) -> None:
    seed = random.randrange(10**6)
    case = Case(way, count, place, workers)
    model, report = check(case, tmp_path, seed)
    again(case, tmp_path, model, report)


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
