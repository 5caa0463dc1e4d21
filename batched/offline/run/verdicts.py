"""Verdicts on the rows for which the function of one step has failed.

By its verdict, a row is called again or is a dead letter. The verdicts work as a circuit breaker
for each step: in doubt, the breaker is open, and a trial is its probe. In an isolating call, the
engine cuts a failing batch in halves until the rows that fail stand alone. A batch succeeds if any
of its rows does. The module has no thread, clock or I/O. The rules:

1. An error of a service is retried, up to `Retry.attempts` calls of the row. The row waits in a
   queue meanwhile. The last of these calls is isolating. If the function retries by itself, the row
   gets one further call, which is isolating.
2. Any other failure is the row's own if another row of its batch succeeds, or if a batch or a trial
   that began after the failure succeeds. A row that failed only together with other rows is called
   once more, in an isolating call.
3. A failure without a later success is set aside. The step is in doubt if all rows of a batch fail
   and no batch has succeeded since that batch began, or if only rows that are set aside are left.
4. A step in doubt gets no new batch, only trials of one row: the sample, which is a row known to
   succeed, or, without a sample, another row each time. The doubt ends if a batch or a trial
   succeeds that began after the doubt.
5. If trials have failed before that success, there was an outage. Rows that failed during the
   outage are called again as if for the first time, in up to `MAX_OUTAGES` outages for each row.
6. The run ends if the doubt lasts for `outage_s`, or if the sample fails `SAMPLE_TRIALS` times with
   an error that is not a service's. The run also ends if the step has never succeeded and
   `FIRST_TRIALS` rows have failed alone with such errors. Rows that are set aside are then not
   committed, so the next run calls them again.
7. If no row is left to try, all rows that are set aside are dead letters.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Final

from ..retry import Retry

FIRST_TRIALS: Final = 16
"""Rows of a step without any success that fail alone before the step counts as broken."""
SAMPLE_TRIALS: Final = 3
"""Failed trials of the sample after which a step counts as broken."""
TRIAL_S: Final = 0.1
"""Shortest time from a failed trial to the next (s). A trial follows at once if the last row failed
by its own error.
"""
MAX_OUTAGES: Final = 5
"""Outages for which the failures of one row are forgiven."""


class Row:
    """One row on its way through the steps."""

    __slots__ = (
        "attempts",
        "inputs",
        "isolating",
        "key",
        "number",
        "outages",
        "result",
        "service_failures",
        "values",
    )

    def __init__(
        self, key: str | int, inputs: tuple[int, ...], values: dict[str, Any], number: int = 0
    ) -> None:
        self.key = key
        self.inputs = inputs  # hash of the source columns on which each step depends, by step
        self.values = values  # by name of a column that steps read
        self.number = number  # place in the source, from 0
        self.attempts = self.service_failures = self.outages = 0  # as `start_step`, without a call
        self.isolating = False
        self.result: Any = None  # output of this step's function, then the result of the step

    def start_step(self) -> None:
        """Reset the counts, for the next step."""
        self.attempts = 0  # calls of this step's function with the row
        self.service_failures = 0  # calls that failed by an error of a service
        self.outages = 0  # outages in which the row has failed
        self.isolating = False  # whether the next call is isolating: see the module
        self.result = None

    def copy(self) -> Row:
        """Return a copy for another step, with its own dict of values."""
        return Row(self.key, self.inputs, dict(self.values), self.number)


@dataclass(slots=True)
class Failure:
    """A row for which the function failed."""

    row: Row
    error: BaseException
    alone: bool
    """Whether the error is this row's alone: no other row of the same call failed with it."""
    moment: float
    """Moment at which the failure was noted (s)."""


class Verdicts:
    """Judge of the failures of one step."""

    def __init__(self, retry: Retry, outage_s: float) -> None:
        self._retry = retry
        self._outage_s = outage_s
        self.sample: Row | None = None  # a row that has succeeded, in this run or an earlier one
        self.in_doubt = False
        self.stopped: tuple[str, BaseException] | None = None  # reason for which the run ends
        self._dead: list[Failure] = []  # failures of dead letters, since `take_dead`
        self.aside: list[Failure] = []  # failures without a verdict
        # rows to be called again, as a heap: from which moment (s), number in the source, the row
        self._retry_queue: list[tuple[float, int, Row]] = []
        self._last_success = -math.inf  # moment of the last success (s)
        self._trial_began = 0.0  # moment at which the last trial began (s)
        self._doubt_began = 0.0  # moment at which the last doubt began (s)
        self._trial_at = math.inf  # moment of the next trial (s); infinite while one is under way
        self._failed_trials = 0  # since the doubt began
        # failed trials of the sample with errors that are not a service's, since the doubt began
        self._sample_errors = 0
        # rows that failed alone with errors that are not a service's, since the last success
        self.failed_alone = 0

    @property
    def pending(self) -> int:
        """Rows without a verdict."""
        return len(self.aside) + len(self._retry_queue)

    def take_dead(self) -> list[Failure]:
        """Remove and return the failures of rows that are dead letters."""
        dead, self._dead = self._dead, []
        return dead

    def next_moment(self) -> float:
        """Return the moment at which a row or a trial is due (s); infinite if none is."""
        if self.in_doubt:
            return self._trial_at
        return self._retry_queue[0][0] if self._retry_queue else math.inf

    def take_due(self, now: float) -> list[Row]:
        """Remove and return the rows to be called again now; none while the step is in doubt."""
        rows = []
        while not self.in_doubt and self._retry_queue and self._retry_queue[0][0] <= now:
            rows.append(heapq.heappop(self._retry_queue)[2])
        return rows

    def _call_again(self, row: Row, moment: float = -math.inf) -> None:
        """Have `row` called again, from a moment on (s)."""
        heapq.heappush(self._retry_queue, (moment, row.number, row))

    def note_batch(
        self, failures: list[Failure], *, succeeded: bool, started: float, now: float
    ) -> None:
        """Judge the failures of a batch that began at `started` (s).

        `succeeded`: whether a row of the batch succeeded.
        """
        if succeeded:
            self._note_success(started, now)
        for failure in failures:
            row = failure.row
            if self._retry.is_service_fault(failure.error):
                row.service_failures += 1
                if row.service_failures < self._retry.attempts:
                    row.isolating = row.service_failures == self._retry.attempts - 1
                    self._call_again(
                        row, now + self._retry.wait(row.service_failures, failure.error)
                    )
                    continue
                failure.alone = failure.alone and row.isolating
            if succeeded:
                self._settle(failure)
            else:
                self._set_aside(failure)
        if failures and not succeeded and self._last_success < started:
            self.doubt(now)

    def doubt(self, now: float) -> None:
        """Put the step in doubt: only trials are sent until one succeeds."""
        if not self.in_doubt:
            self.in_doubt = True
            self._doubt_began = self._trial_at = now

    def candidates(self) -> list[Row]:
        """Return the rows without a verdict whose next call may have another outcome."""
        return [row for _, _, row in self._retry_queue] + [
            each.row
            for each in self.aside
            if not each.alone or self._retry.is_service_fault(each.error)
        ]

    def start_trial(self, row: Row, now: float) -> None:
        """Note that `row`, the sample or another, is being tried alone."""
        self._trial_at = math.inf
        self._trial_began = now
        self._retry_queue = [each for each in self._retry_queue if each[2] is not row]
        heapq.heapify(self._retry_queue)
        self.aside = [each for each in self.aside if each.row is not row]

    def end_trial(self, row: Row, error: BaseException | None, now: float) -> None:
        """Note how the trial of `row` has ended."""
        if error is None:
            self._note_success(self._trial_began, now)
            return
        self._failed_trials += 1
        is_own = not self._retry.is_service_fault(error)
        is_sample = row is self.sample
        if is_sample:
            self._sample_errors += is_own
        else:
            self._set_aside(Failure(row, error, True, now))
        if self._sample_errors >= SAMPLE_TRIALS:
            self.stopped = "fails even for a row that it has computed before", error
        elif self._stop_first(error):
            pass
        elif now - self._doubt_began >= self._outage_s:
            self.stopped = f"has not succeeded for {now - self._doubt_began:,.0f} s", error
        # a row that failed by its own error says little of the step: the next is tried at once
        self._trial_at = now
        if is_sample or not is_own:
            self._trial_at += max(TRIAL_S, self._retry.wait(self._failed_trials, error))

    def give_up(self) -> None:
        """Make all rows that are set aside dead letters, because no row is left to try.

        The run ends instead if the step has never succeeded, and `FIRST_TRIALS` rows have failed
        alone (rule 6).
        """
        if not (self.aside and self._stop_first(self.aside[-1].error)):
            self._dead += self.aside
            self.aside = []
            self.in_doubt = False

    def _set_aside(self, failure: Failure) -> None:
        self.aside.append(failure)
        self.failed_alone += failure.alone and not self._retry.is_service_fault(failure.error)

    def _stop_first(self, error: BaseException) -> bool:
        """Stop the run if the step has never succeeded and too many rows have failed alone."""
        if self.sample is None and self.failed_alone >= FIRST_TRIALS:
            why = f"has never succeeded, in {self.failed_alone} rows tried one by one"
            self.stopped = why, error
        return self.stopped is not None

    def _note_success(self, began: float, now: float) -> None:
        """Note the success of a batch or trial that began at `began` (s)."""
        self._last_success = now
        self.failed_alone = 0
        outage = False
        if self.in_doubt and began >= self._doubt_began:
            outage = self._failed_trials > 0
            self.in_doubt = False
            self._failed_trials = self._sample_errors = 0
        aside, self.aside = self.aside, []
        if outage:
            retry_queue, self._retry_queue = self._retry_queue, []
            for _, _, row in retry_queue:
                self._reset_counts(row)
                self._call_again(row)
        for failure in aside:
            if outage and self._reset_counts(failure.row):
                self._call_again(failure.row)
            elif outage or failure.moment <= began:
                self._settle(failure)
            else:
                self.aside.append(failure)

    def _reset_counts(self, row: Row) -> bool:
        """Treat `row` as if it had not failed. Return False after `MAX_OUTAGES` outages."""
        if row.outages >= MAX_OUTAGES:
            return False
        row.outages += 1
        row.service_failures, row.isolating = 0, False
        return True

    def _settle(self, failure: Failure) -> None:
        """Decide on a failure after a success that shows that the step works."""
        if failure.alone:
            self._dead.append(failure)
        else:
            failure.row.isolating = True
            self._call_again(failure.row)
