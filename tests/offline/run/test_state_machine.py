"""Runs, kills, edits and changes of settings in any order, over one progress file.

A Hypothesis state machine: after each run that comes to its end, the result is that of a model
which knows nothing of progress, and no row was computed that was committed already.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from trial_runs import calls_in, committed_in, computed_again
from trials import Trials

pytestmark = pytest.mark.once

MOST_KEYS: Final = 40
LEAST_ROWS: Final = 10
MOST_BAD: Final = 3
"""Bad rows of the source: fewer than a batch has, so that a step is never taken for broken."""
FIRST: Final = "bad "
SECOND: Final = "worse "
DROPPED: Final = "drop "
ERRORS: Final = {FIRST: "ValueError: bad text", SECOND: "ValueError: worse text"}
REASONS: Final = ("", None, *ERRORS.values())
"""Errors of rows that can be read; none if the result has no column of errors."""

Work = tuple[int, int]
"""Step and key."""


class Runs(RuleBasedStateMachine):
    """One source, one progress file, and a model of their result."""

    server: Trials
    places = st.integers(0, 1000)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.log = self.folder / "log"
        self.progress = self.folder / "progress"
        self.rows: dict[int, str] = {}  # text by key, in order
        self.edits = 0
        self.version = 1
        self.settings: dict[str, Any] = {"batch_size": 4, "workers": 1, "failed": "drop"}
        self.suffix = ".jsonl"
        self.from_file = False
        self.broken: list[int] = []  # places of lines that are no JSON, in files
        self.twice: list[int] = []  # keys of further rows in the end
        # input for which a result is committed; None: an unknown input
        self.committed: dict[Work, str | None] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def first_rows(self) -> None:
        self.rows = {key: self.new_text(key) for key in range(LEAST_ROWS + 2)}

    def new_text(self, key: int) -> str:
        self.edits += 1
        return f"row {key} of {self.edits}"

    def at(self, place: int) -> int:
        """Return a key of the source."""
        return list(self.rows)[place % len(self.rows)]

    def bad_rows(self) -> list[int]:
        return [key for key, text in self.rows.items() if text.startswith((FIRST, SECOND))]

    # --- the source and the settings

    @rule(places=st.lists(places, min_size=1, max_size=4))
    def edit(self, places: list[int]) -> None:
        for place in places:
            key = self.at(place)
            self.rows[key] = self.new_text(key)

    @rule(keys=st.lists(st.integers(0, MOST_KEYS), min_size=1, max_size=6))
    def add(self, keys: list[int]) -> None:
        for key in keys:
            # a key that comes back has its old text: its results are committed still
            self.rows.setdefault(key, f"row {key} again")

    @rule(places=st.lists(places, min_size=1, max_size=4))
    def remove(self, places: list[int]) -> None:
        for place in places:
            if len(self.rows) > LEAST_ROWS:
                key = self.at(place)
                del self.rows[key]
                self.twice = [each for each in self.twice if each != key]

    @rule(order=st.randoms(use_true_random=False))
    def shuffle(self, order: Any) -> None:
        rows = [*self.rows.items()]
        order.shuffle(rows)
        self.rows = dict(rows)

    @precondition(lambda self: len(self.bad_rows()) < MOST_BAD)
    @rule(place=places, how=st.sampled_from([FIRST, SECOND]))
    def spoil(self, place: int, how: str) -> None:
        key = self.at(place)
        self.rows[key] = how + self.rows[key].removeprefix(FIRST).removeprefix(SECOND)

    @precondition(lambda self: self.bad_rows())
    @rule(place=places)
    def mend(self, place: int) -> None:
        key = self.bad_rows()[place % len(self.bad_rows())]
        self.rows[key] = self.rows[key].removeprefix(FIRST).removeprefix(SECOND)

    @rule(place=places)
    def drop(self, place: int) -> None:
        key = self.at(place)
        if key not in self.bad_rows():
            self.rows[key] = DROPPED + self.new_text(key)

    @rule(places=st.lists(places, max_size=2))
    def break_lines(self, places: list[int]) -> None:
        self.broken = places

    @rule(places=st.lists(places, max_size=2))
    def repeat_keys(self, places: list[int]) -> None:
        self.twice = [self.at(place) for place in places]

    @rule(
        batch_size=st.sampled_from([4, 7, 64]),
        workers=st.sampled_from([1, 3]),
        failed=st.sampled_from(["drop", "keep"]),
    )
    def change_settings(self, batch_size: int, workers: int, failed: str) -> None:
        self.settings = {"batch_size": batch_size, "workers": workers, "failed": failed}

    @rule(suffix=st.sampled_from([".jsonl", ".parquet"]), from_file=st.booleans())
    def change_files(self, suffix: str, from_file: bool) -> None:
        self.suffix, self.from_file = suffix, from_file

    @rule()
    def change_code(self) -> None:
        self.version += 1

    # --- runs

    @rule(call=st.integers(1, 12))
    def run_and_be_killed(self, call: int) -> None:
        ended = self.run(call)
        if ended.how == "done":
            self.check(ended.result)
            return
        assert ended.how == "killed", ended
        called = {(step, key) for step, keys in calls_in(self.log) for key in keys}
        statuses = committed_in(self.progress)
        found = {work for work, status in statuses.items() if status != "failed"}
        self.forget_old_code(found)
        # if the first step of a row is computed again, the result of the second one may go
        called |= {(1, key) for step, key in called if step == 0}
        lost = {work: statuses.get(work) for work in set(self.committed) - called - found}
        assert not lost, f"committed rows are lost: {lost}"
        for work in called:
            self.committed.pop(work, None)
        self.committed |= dict.fromkeys(found & called)

    @rule()
    def run_to_the_end(self) -> None:
        ended = self.run()
        assert ended.how == "done", f"{ended.error}\n{ended.lines}"
        self.check(ended.result)

    def run(self, kill_at_call: int = 0) -> Any:
        self.log.unlink(missing_ok=True)
        source: Any = [{"id": key, "text": text} for key, text in self.rows.items()]
        source += [{"id": key, "text": f"row {key} once more"} for key in self.twice]
        if self.from_file:
            path = self.folder / "in.jsonl"
            lines = [json.dumps(row) for row in source]
            for place in self.broken:
                lines.insert(place % len(lines), '{"id": 3, "te')
            path.write_text("\n".join([*lines, ""]))
            source = str(path)
        return self.server.run(
            "two_steps",
            source=source,
            dest=str(self.folder / f"out{self.suffix}"),
            progress=str(self.progress),
            log=str(self.log),
            version=self.version,
            on_mismatch="recompute",
            overwrite=True,  # of two destinations, the progress file knows the last one
            kill_at_call=kill_at_call,
            **self.settings,
        )

    def forget_old_code(self, found: set[Work]) -> None:
        """Drop results of the second step by other code: they are gone once a run has begun."""
        if self.version != getattr(self, "version_before", self.version):
            self.committed = {
                work: text for work, text in self.committed.items() if work[0] == 0 or work in found
            }
            for work in self.committed:
                if work[0] == 1:
                    self.committed[work] = None
        self.version_before = self.version

    # --- the model

    def expected_inputs(self) -> dict[Work, str]:
        """Input of each step for each row that comes to it."""
        inputs: dict[Work, str] = {}
        for key, text in self.rows.items():
            inputs[0, key] = text
            if not text.startswith((FIRST, DROPPED)):
                inputs[1, key] = text.upper()
        return inputs

    def expected_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the result, without rows that cannot be read."""
        found = []
        for key, text in self.rows.items():
            row = {"id": key, "text": text, "loud": text.upper()}
            good = {"size": len(text), "share": len(text) / (6 + self.version)}
            none = {"size": None, "share": None}
            if text.startswith(DROPPED):
                continue
            if self.settings["failed"] == "drop":
                found += [] if text.startswith((FIRST, SECOND)) else [{**row, **good}]
            elif text.startswith(FIRST):
                found.append({**row, "loud": None, **none, "_error": ERRORS[FIRST]})
            elif text.startswith(SECOND):
                found.append({**row, **none, "_error": ERRORS[SECOND]})
            else:
                found.append({**row, **good, "_error": None})
        return found

    def check(self, report: dict[str, Any]) -> None:
        """Compare a run that came to its end with the model."""
        expected = self.expected_rows()
        dest = self.folder / f"out{self.suffix}"
        unread = len(self.twice) + len(self.broken) * self.from_file
        if self.suffix == ".jsonl":
            found = [json.loads(line) for line in dest.read_text().splitlines()]
        else:
            found = pq.read_table(dest).to_pylist()
        unreadable = [row for row in found if row.get("_error", "") not in REASONS]
        assert len(unreadable) == unread * (self.settings["failed"] == "keep")
        assert str([row for row in found if row not in unreadable]) == str(expected)
        letters = [
            [key, "shout" if text.startswith(FIRST) else "measure", "inference"]
            for key, text in self.rows.items()
            if text.startswith((FIRST, SECOND))
        ]
        told = [letter for letter in report["letters"] if letter[0] in self.rows and letter[1]]
        assert told == sorted(letters, key=str)
        assert len([letter for letter in report["letters"] if letter[2] == "source"]) == unread
        self.check_work(report, self.expected_inputs(), len(letters) + unread)

    def check_work(self, report: dict[str, Any], inputs: dict[Work, str], failed: int) -> None:
        """Look at the counts, and at the calls of the functions."""
        self.forget_old_code(set())
        known = {work for work, text in inputs.items() if self.committed.get(work, "") == text}
        unsure = {work for work in inputs if self.committed.get(work, "") is None}
        steps = {key: {(0, key), (1, key)} & set(inputs) for key in self.rows}
        done = [key for key in self.rows if steps[key] <= known]
        perhaps = [key for key in self.rows if steps[key] <= known | unsure]
        counted = sum(report[name] for name in ("ok", "failed", "skipped", "filtered"))
        lines = len(self.rows) + len(self.twice) + len(self.broken) * self.from_file
        assert counted == lines
        assert report["failed"] == failed
        assert len(done) <= report["skipped"] <= len(perhaps)
        # if the first step of a row is computed again, the second one may be
        redone = {key for step, keys in calls_in(self.log) if step == 0 for key in keys}
        kept = {(step, key) for step, key in known if not (step and key in redone)}
        assert not computed_again(self.log, kept), "computed though committed"
        self.committed |= inputs
        for key, text in self.rows.items():
            if (1, key) not in inputs:  # the row ended in the first step
                self.committed.pop((1, key), None)
            if text.startswith((FIRST, SECOND)):
                self.committed.pop((int(text.startswith(SECOND)), key), None)


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(12, 12, marks=pytest.mark.timeout(180)),
        pytest.param(150, 30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_runs_in_any_order_come_to_the_result_of_one(
    server: Trials, examples: int, steps: int
) -> None:
    kind = type("Runs", (Runs,), {"server": server})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=True,
        # kills come when they come: the same rules may not fail twice
        phases=[Phase.generate, *[Phase.shrink] * (examples > 12)],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(kind, settings=chosen)
