"""One rule for the failures of a step: retries, doubt, trials, outages and dead letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from batched.offline.engines.engine import GivenUp
from batched.offline.retry import Retry
from batched.offline.run.failures import FIRST, LATER, Failures, Row

BAD = ValueError("bad row")
DOWN = ConnectionError("down")
RETRY = Retry(attempts=3, wait_initial=1.0, wait_max=8.0, wait_jitter=0.0)


class Judge(Failures):
    """Failures of one step, and a clock."""

    def __init__(self, retry: Retry = RETRY, outage_s: float = 100.0) -> None:
        super().__init__("step", retry, outage_s)
        self.now = 0.0

    def fail(self, rows: Iterable[Row], error: Exception = BAD, *, alone: bool = True) -> None:
        """Note that a batch has failed as a whole."""
        self.now += 1
        failed: list[Any] = []
        for row in rows:
            row.attempts += 1
            failed.append((row, error if alone else GivenUp(error)))
        self.note(failed, worked=False, now=self.now)

    def work(self) -> None:
        """Note that a batch has worked."""
        self.now += 1
        self.note([], worked=True, now=self.now)

    def try_row(self, error: Exception | None = None, waiting: Sequence[Row] = ()) -> Row:
        """Try a row."""
        assert self.doubt
        self.now = max(self.now, self.trial_at) + 1
        row = self.pick(deque(waiting))
        assert row is not None
        row.attempts += 1
        self.note([(row, error)] if error else [], worked=not error, now=self.now)
        self.trial = None
        return row

    def due(self, after: float = 0.0) -> list[int]:
        """Return the rows to be called again so much later."""
        self.now += after
        return [row.number for row in self.take_due(self.now)]

    def letters(self) -> list[int]:
        dead, self.dead = self.dead, []
        return sorted(row.number for row, _, _ in dead)


def rows_of(count: int) -> list[Row]:
    return [Row(number, (), {}, number) for number in range(count)]


def test_an_error_of_a_service_is_retried_after_a_wait_and_searched_in_the_last_call() -> None:
    judge, (row,) = Judge(), rows_of(1)
    judge.work()
    judge.fail([row], DOWN)
    assert judge.due(0.5) == []
    assert judge.due(0.5) == [0]
    assert not row.searched
    judge.work()
    judge.fail([row], DOWN)
    assert judge.due(2) == [0]
    assert row.searched
    judge.work()
    judge.fail([row], DOWN)
    assert judge.due(100) == []
    judge.work()
    assert judge.letters() == [0]
    busy: Any = ConnectionError()
    busy.retry_after = 5
    judge.fail(rows_of(1), busy)
    assert judge.moment(judge.now) == judge.now + 5


def test_calls_of_a_service_that_answers_nobody_do_not_count() -> None:
    judge, (row,) = Judge(), rows_of(1)
    judge.work()
    for _ in range(5):
        judge.fail([row], DOWN)
        assert judge.due(10) == [0]
    assert not row.searched
    judge.work()
    judge.fail([row], DOWN)
    assert row.searched


def test_a_function_that_retries_by_itself_gets_one_further_call_for_each_row() -> None:
    judge, rows = Judge(Retry(attempts=1, wait_jitter=0)), rows_of(2)
    judge.fail(rows, DOWN)
    assert judge.due(10) == [0, 1]
    judge.work()
    judge.fail(rows[:1], DOWN)
    judge.work()
    assert judge.letters() == [0]


def test_a_batch_that_is_given_up_is_searched_once_the_probe_has_worked() -> None:
    judge, rows = Judge(), rows_of(64)
    judge.work()
    judge.probe = Row(99, (), {})
    judge.fail(rows, alone=False)
    assert judge.try_row() is judge.probe
    assert judge.due() == [*range(64)]
    assert all(row.searched for row in rows)
    assert not judge.doubt


def test_a_batch_in_which_rows_have_worked_is_searched_without_a_trial() -> None:
    judge, rows = Judge(), rows_of(2)
    judge.note([(row, GivenUp(BAD)) for row in rows], worked=True, now=2)
    assert not judge.doubt
    assert judge.due(2) == [0, 1]
    assert rows[0].searched


def test_rows_that_fail_in_a_row_have_the_probe_tried_and_the_count_begins_anew() -> None:
    judge, rows = Judge(), rows_of(2 * LATER)
    judge.work()
    judge.probe = Row(999, (), {})
    for half in (rows[:LATER], rows[LATER:]):
        for row in half:
            assert not judge.doubt
            judge.fail([row])
        judge.try_row()
    assert judge.letters() == [*range(2 * LATER)]


def test_a_function_that_never_works_ends_the_run_after_a_few_rows_from_different_places() -> None:
    judge, rows = Judge(), rows_of(1000)
    for row in rows[:FIRST]:
        judge.fail([row])
    waiting, tried = deque(rows[FIRST:]), []
    while judge.stopped is None:
        picked = judge.pick(waiting)
        assert picked is not None
        tried.append(picked.number)
        judge.note([(picked, BAD)], worked=False, now=99)
    assert len(tried) == FIRST
    assert max(tried) - min(tried) > 800
    assert judge.stopped[0] == f"has never succeeded, in {2 * FIRST} rows tried one by one"


def test_an_outage_costs_no_call_of_any_row() -> None:
    judge, rows = Judge(), rows_of(2)
    judge.work()
    judge.probe = Row(99, (), {})
    judge.fail(rows, DOWN)
    judge.doubt_rest()
    moments = []
    for _ in range(5):
        judge.try_row(DOWN)
        moments.append(judge.trial_at - judge.now)
    assert moments == [1, 2, 4, 8, 8]
    judge.try_row()
    assert judge.due() == [0, 1]
    assert [row.faults for row in rows] == [1, 1]
    assert judge.letters() == []


def test_an_outage_ends_the_run_after_its_time_and_is_logged_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judge = Judge(outage_s=20)
    rows = rows_of(2)
    while judge.stopped is None:
        assert judge.now < 100
        judge.fail(rows, DOWN)
        judge.due(8)
    assert judge.stopped[0].startswith("has not succeeded for 2")
    (message,) = caplog.messages
    assert message.startswith("step 'step' has not succeeded for ")
    assert message.endswith("and waits for its service, 20 s at most: ConnectionError: down")
