"""Verdicts on failures: arithmetic with literal moments, no thread and no clock."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from batched.offline.retry import Retry
from batched.offline.run.verdicts import (
    FIRST_TRIALS,
    MAX_OUTAGES,
    SAMPLE_TRIALS,
    Failure,
    Row,
    Verdicts,
)

pytestmark = pytest.mark.once

AWAY = ConnectionError("refused")
BAD = ValueError("bad row")
RETRY = Retry(attempts=3, wait_initial=1.0, wait_max=8.0, wait_jitter=0)


def rows(count: int) -> list[Row]:
    return [Row(number, (0,), {}, number) for number in range(count)]


class Judge:
    """Verdicts, and calls of them as a stage makes them."""

    def __init__(
        self, retry: Retry = RETRY, outage_s: float = 60.0, sample: Row | None = None
    ) -> None:
        self.verdicts = Verdicts(retry, outage_s)
        self.verdicts.sample = sample

    def batch(
        self,
        failed: list[Row],
        error: BaseException,
        *,
        alone: bool = True,
        ok: bool = False,
        at: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.verdicts.note_batch(
            [Failure(row, error, alone, at[1]) for row in failed],
            succeeded=ok,
            started=at[0],
            now=at[1],
        )

    def trial(self, row: Row, error: BaseException | None, now: float) -> None:
        assert self.verdicts.in_doubt
        self.verdicts.start_trial(row, now)
        assert self.verdicts.next_moment() == math.inf, "one trial at a time"
        self.verdicts.end_trial(row, error, now)

    @property
    def dead(self) -> list[Row]:
        return [failure.row for failure in self.verdicts.take_dead()]


def test_a_row_that_fails_beside_rows_that_succeed_is_at_fault() -> None:
    judge = Judge()
    (row,) = rows(1)
    judge.batch([row], BAD, ok=True)
    assert judge.dead == [row]
    assert not judge.verdicts.pending


def test_an_error_of_a_service_is_retried_with_growing_waits() -> None:
    judge = Judge()
    (row,) = rows(1)
    judge.batch([row], AWAY, ok=True, at=(0.0, 10.0))
    assert judge.verdicts.next_moment() == 11.0
    assert judge.verdicts.take_due(10.9) == []
    assert judge.verdicts.take_due(11.0) == [row]
    judge.batch([row], AWAY, ok=True, at=(11.0, 11.0))
    assert judge.verdicts.next_moment() == 13.0
    assert row.isolating, "the last call is narrowed to the end"
    assert judge.verdicts.take_due(13.0) == [row]
    judge.batch([row], AWAY, ok=True, at=(13.0, 13.0))
    assert judge.dead == [row]


def test_a_batch_that_fails_as_a_whole_is_set_aside_until_the_step_works() -> None:
    judge = Judge()
    bad = rows(2)
    judge.batch(bad, BAD, at=(0.0, 1.0))
    assert judge.dead == []
    assert judge.verdicts.in_doubt
    (other,) = rows(1)
    judge.trial(other, None, 2.0)
    assert judge.dead == bad
    assert not judge.verdicts.in_doubt


def test_no_doubt_arises_where_another_batch_has_succeeded_meanwhile() -> None:
    judge = Judge()
    (bad,) = rows(1)
    judge.batch([], BAD, ok=True, at=(0.0, 5.0))
    judge.batch([bad], BAD, at=(1.0, 6.0))
    assert not judge.verdicts.in_doubt
    assert judge.dead == []
    judge.batch([], BAD, ok=True, at=(6.0, 7.0))
    assert judge.dead == [bad]


def test_the_success_of_a_batch_that_began_before_a_failure_says_nothing_about_it() -> None:
    judge = Judge()
    bad, other = rows(2)
    judge.batch([bad], BAD, at=(0.0, 6.0))
    judge.batch([], BAD, ok=True, at=(5.0, 7.0))
    assert judge.dead == []
    assert judge.verdicts.in_doubt
    judge.trial(other, None, 8.0)
    assert judge.dead == [bad]


def test_rows_that_failed_only_together_are_isolated_once_the_step_works() -> None:
    judge = Judge()
    given_up = rows(3)
    judge.batch(given_up, BAD, alone=False)
    (other,) = rows(1)
    judge.trial(other, None, 1.0)
    assert judge.dead == []
    assert judge.verdicts.take_due(1.0) == given_up
    assert all(row.isolating for row in given_up)


def test_no_row_leaves_while_the_step_is_in_doubt() -> None:
    judge = Judge()
    some = rows(2)
    judge.batch(some, AWAY, alone=False)
    assert judge.verdicts.take_due(math.inf) == []
    assert judge.verdicts.candidates() == some


def test_rows_that_failed_in_an_outage_are_called_as_if_for_the_first_time() -> None:
    known, *some = rows(3)
    judge = Judge(sample=known)
    judge.batch(some, AWAY, alone=False, at=(0.0, 0.0))
    judge.trial(known, AWAY, 0.0)
    assert judge.verdicts.next_moment() == 1.0, "trials wait"
    judge.trial(known, AWAY, 1.0)
    assert judge.verdicts.next_moment() == 3.0
    judge.trial(known, None, 3.0)
    assert judge.verdicts.take_due(3.0) == some
    assert [row.service_failures for row in some] == [0, 0]


def test_a_row_that_fails_whenever_the_step_works_is_at_fault_in_the_end() -> None:
    known, row = rows(2)
    judge = Judge(Retry(attempts=1), sample=known)
    for now in map(float, range(1, MAX_OUTAGES + 2)):
        assert judge.dead == []
        judge.batch([row], AWAY, at=(now, now))
        judge.trial(known, AWAY, now)
        judge.trial(known, None, now)
        assert judge.verdicts.take_due(now) == [row]
    judge.batch([row], AWAY, at=(9.0, 9.0))
    judge.trial(known, None, 9.0)
    assert judge.dead == [row]


def test_the_only_row_left_is_at_fault_if_the_sample_succeeds() -> None:
    known, row = rows(2)
    judge = Judge(Retry(attempts=1), sample=known)
    judge.batch([row], AWAY, at=(0.0, 0.0))
    judge.trial(known, None, 0.0)
    assert judge.verdicts.take_due(0.0) == [row]
    judge.batch([row], AWAY, at=(1.0, 1.0))
    judge.trial(known, None, 1.0)
    assert judge.dead == [row]


def test_an_outage_ends_the_run_after_its_time_and_not_before() -> None:
    known, row = rows(2)
    judge = Judge(outage_s=60.0, sample=known)
    judge.batch([row], AWAY, at=(99.0, 100.0))
    judge.trial(known, AWAY, 159.9)
    assert judge.verdicts.stopped is None
    judge.trial(known, AWAY, 160.0)
    assert judge.verdicts.stopped
    assert judge.verdicts.stopped[1] is AWAY
    assert judge.dead == [], "nothing that is set aside is committed"


def test_time_without_work_is_no_outage() -> None:
    known, row = rows(2)
    judge = Judge(outage_s=60.0, sample=known)
    judge.batch([], BAD, ok=True, at=(0.0, 0.0))
    judge.batch([row], AWAY, at=(900.0, 900.0))
    judge.trial(known, AWAY, 901.0)
    assert judge.verdicts.stopped is None


def test_a_sample_that_fails_by_itself_ends_the_run_soon() -> None:
    known, row = rows(2)
    judge = Judge(sample=known)
    judge.batch([row], BAD)
    for trial in range(SAMPLE_TRIALS):
        assert judge.verdicts.stopped is None
        judge.trial(known, BAD, float(trial))
    assert judge.verdicts.stopped is not None


def test_a_function_that_never_works_ends_the_run_after_some_rows_and_no_waits() -> None:
    judge = Judge()
    many = rows(FIRST_TRIALS)
    judge.batch(many, BAD, alone=False)
    for row in many:
        assert judge.verdicts.stopped is None
        assert judge.verdicts.next_moment() == 0.0
        judge.trial(row, BAD, 0.0)
    assert judge.verdicts.stopped is not None


def test_rows_that_failed_before_count_for_a_function_that_never_works() -> None:
    judge = Judge()
    for row in rows(FIRST_TRIALS - 1):
        judge.batch([row], BAD)
        judge.verdicts.give_up()
        assert judge.dead == [row]
    judge.batch(rows(1), BAD)
    judge.verdicts.give_up()
    assert judge.verdicts.stopped is not None
    assert judge.dead == []


def test_failures_stand_where_no_row_is_left_to_try() -> None:
    judge = Judge()
    few = rows(3)
    judge.batch(few, BAD, alone=False)
    for row in few:
        assert row in judge.verdicts.candidates()
        judge.trial(row, BAD, 0.0)
    assert judge.verdicts.candidates() == []
    judge.verdicts.give_up()
    assert judge.dead == few
    assert not judge.verdicts.in_doubt


def test_a_service_that_never_answered_is_waited_for() -> None:
    judge = Judge(outage_s=600.0)
    (row,) = rows(1)
    judge.batch([row], AWAY, alone=False)
    for now in (1.0, 10.0, 599.0):
        assert judge.verdicts.candidates() == [row]
        judge.trial(row, AWAY, now)
        assert judge.verdicts.stopped is None
        assert judge.verdicts.next_moment() > now
    judge.trial(row, AWAY, 600.0)
    assert judge.verdicts.stopped is not None


@pytest.mark.parametrize("error", [AWAY, BAD])
def test_every_row_is_in_one_place(error: Any) -> None:
    judge = Judge()
    some = rows(4)
    judge.batch(some, error, alone=False)
    assert judge.verdicts.pending == 4
    judge.trial(some[0], None, 0.0)
    left = [*judge.verdicts.take_due(math.inf), *judge.dead]
    assert sorted(row.number for row in left) == [1, 2, 3]
