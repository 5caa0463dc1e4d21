"""Verdicts on the rows for which the function of one step has failed.

The module has no thread, clock or I/O. A step *works* from one success to the next batch that fails
as a whole, unless another batch has succeeded since that batch began. The rules:

1. An error of a service is retried, up to `Retry.attempts` calls of the row. The row waits in a
   calendar meanwhile. The last of these calls is thorough: the engine narrows its batch to the end.
   A function that retries by itself gets one thorough call more.
2. Any other failure is the row's own if the step works after it: a batch or a trial that began
   after the failure succeeds. A row that failed only together with other rows is called once more,
   thoroughly.
3. A failure without a success after it is set aside. A batch that fails as a whole puts the step in
   doubt. So does the end of all other work while rows are set aside.
4. A step in doubt gets no new batch, only trials of one row: the sample, which is a row known to
   succeed, or another row each time. The success of a batch or trial that began later ends the
   doubt.
5. If trials have failed before that success, there was an outage. Rows that failed meanwhile are
   called again, as if for the first time, up to `RESCUES` times.
6. The run ends if the doubt lasts for `outage_s`; if the sample fails `SAMPLE_TRIALS` times with an
   error that is not a service's; or if `FIRST_TRIALS` rows of a step that has never worked do.
   Nothing that is set aside is committed then.
7. If no row is left to try, all failures stand.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any, Final

from ..retry import Retry

FIRST_TRIALS: Final = 16
"""Rows that are tried before a step counts as broken that has never worked."""
SAMPLE_TRIALS: Final = 3
"""Failed trials of the sample after which a step counts as broken."""
TRIAL_S: Final = 0.1
"""Shortest time between two trials that are not of a row's own (s)."""
RESCUES: Final = 5
"""Outages after which the failures of one row no longer count as the outage's."""


class Row:
    """One row on its way through the steps."""

    __slots__ = (
        "attempts",
        "inputs",
        "key",
        "number",
        "rescues",
        "result",
        "thorough",
        "tries",
        "values",
    )

    def __init__(
        self, key: str | int, inputs: tuple[int, ...], values: dict[str, Any], number: int = 0
    ) -> None:
        self.key = key
        self.inputs = inputs  # for each step, hash of the source columns that it depends on
        self.values = values  # by name of a column that steps read
        self.number = number  # place in the source, from 0
        self.attempts = self.tries = self.rescues = 0  # as in `start_step`, whose call takes time
        self.thorough = False
        self.result: Any = None  # output of this step's function, then the result of the step

    def start_step(self) -> None:
        """Reset the counts, for the next step."""
        self.attempts = 0  # calls of this step's function with the row
        self.tries = 0  # calls that failed by an error of a service
        self.rescues = 0  # outages in which the row has failed
        self.thorough = False  # whether a failing batch of the row is narrowed to the end
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
    """Whether the row was called by itself, or failed while other rows of its call did not."""
    moment: float
    """Time at which the failure was noted (s)."""


class Verdicts:
    """Judge of the failures of one step."""

    def __init__(self, retry: Retry, outage_s: float) -> None:
        self._retry = retry
        self._outage_s = outage_s
        self.sample: Row | None = None  # a row that has succeeded, in this run or an earlier one
        self.in_doubt = False
        self.stopped: tuple[str, BaseException] | None = None  # reason for which the run ends
        self._dead: list[Failure] = []  # failures that stand
        self.aside: list[Failure] = []  # failures without a verdict
        # rows to be called again: from which moment (s), number in the source, the row
        self._calendar: list[tuple[float, int, Row]] = []
        self._last_success = -math.inf  # moment (s)
        self._trial_began = 0.0  # moment (s)
        self._doubt_began = 0.0  # moment (s)
        self._trial_at = math.inf  # moment of the next trial (s); infinite while one is under way
        self._failed_trials = 0  # since the doubt began
        self._sample_errors = 0  # failures of the sample, since then, that are not a service's
        # rows since the last success that failed alone, by errors that are not a service's
        self.failed_alone = 0

    @property
    def pending(self) -> int:
        """Rows without a verdict."""
        return len(self.aside) + len(self._calendar)

    def take_dead(self) -> list[Failure]:
        """Return the failures that stand since the last call."""
        dead, self._dead = self._dead, []
        return dead

    def next_moment(self) -> float:
        """Return the moment at which a row or a trial is due (s)."""
        if self.in_doubt:
            return self._trial_at
        return self._calendar[0][0] if self._calendar else math.inf

    def take_due(self, now: float) -> list[Row]:
        """Return the rows to be called again now; none while the step is in doubt."""
        rows = []
        while not self.in_doubt and self._calendar and self._calendar[0][0] <= now:
            rows.append(heapq.heappop(self._calendar)[2])
        return rows

    def _call_again(self, row: Row, moment: float = -math.inf) -> None:
        """Have `row` called again, from a moment on (s)."""
        heapq.heappush(self._calendar, (moment, row.number, row))

    def note_batch(
        self, failures: list[Failure], *, succeeded: bool, started: float, now: float
    ) -> None:
        """Judge the failures of a batch that began at `started`.

        `succeeded`: a row of the batch succeeded.
        """
        if succeeded:
            self._note_success(started, now)
        for failure in failures:
            row = failure.row
            if self._retry.is_due(failure.error):
                row.tries += 1
                if row.tries < self._retry.attempts:
                    row.thorough = row.tries == self._retry.attempts - 1
                    self._call_again(row, now + self._retry.wait(row.tries, failure.error))
                    continue
                failure.alone = failure.alone and row.thorough
            if succeeded:
                self._settle(failure)
            else:
                self._set_aside(failure)
        if failures and not succeeded and self._last_success < started:
            self.doubt(now)

    def doubt(self, now: float) -> None:
        """Send trials only, until one succeeds."""
        if not self.in_doubt:
            self.in_doubt = True
            self._doubt_began = self._trial_at = now

    def candidates(self) -> list[Row]:
        """Return the rows without a verdict that a trial could tell more about."""
        return [row for _, _, row in self._calendar] + [
            each.row for each in self.aside if not each.alone or self._retry.is_due(each.error)
        ]

    def start_trial(self, row: Row, now: float) -> None:
        """Note that `row`, the sample or another, is being tried alone."""
        self._trial_at = math.inf
        self._trial_began = now
        self._calendar = [each for each in self._calendar if each[2] is not row]
        heapq.heapify(self._calendar)
        self.aside = [each for each in self.aside if each.row is not row]

    def end_trial(self, row: Row, error: BaseException | None, now: float) -> None:
        """Note how the trial of `row` has ended."""
        if error is None:
            self._note_success(self._trial_began, now)
            return
        self._failed_trials += 1
        is_own = not self._retry.is_due(error)
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
        # a row of its own may fail by itself; the next one is tried at once
        self._trial_at = now
        if is_sample or not is_own:
            self._trial_at += max(TRIAL_S, self._retry.wait(self._failed_trials, error))

    def bury(self) -> None:
        """Let all failures that are set aside stand: no row is left to try."""
        if not (self.aside and self._stop_first(self.aside[-1].error)):
            self._dead += self.aside
            self.aside = []
            self.in_doubt = False

    def _set_aside(self, failure: Failure) -> None:
        self.aside.append(failure)
        self.failed_alone += failure.alone and not self._retry.is_due(failure.error)

    def _stop_first(self, error: BaseException) -> bool:
        """Stop the run if too many rows of a step that has never worked have failed alone."""
        if self.sample is None and self.failed_alone >= FIRST_TRIALS:
            why = f"has never succeeded, in {self.failed_alone} rows tried one by one"
            self.stopped = why, error
        return self.stopped is not None

    def _note_success(self, began: float, now: float) -> None:
        """Note the success of a batch or trial that began at `began`."""
        self._last_success = now
        self.failed_alone = 0
        outage = False
        if self.in_doubt and began >= self._doubt_began:
            outage = self._failed_trials > 0
            self.in_doubt = False
            self._failed_trials = self._sample_errors = 0
        aside, self.aside = self.aside, []
        if outage:
            calendar, self._calendar = self._calendar, []
            for _, _, row in calendar:
                self._rescue(row)
                self._call_again(row)
        for failure in aside:
            if outage and self._rescue(failure.row):
                self._call_again(failure.row)
            elif outage or failure.moment <= began:
                self._settle(failure)
            else:
                self.aside.append(failure)

    def _rescue(self, row: Row) -> bool:
        """Treat `row` as if it had not failed; return False if that has happened too often."""
        if row.rescues >= RESCUES:
            return False
        row.rescues += 1
        row.tries, row.thorough = 0, False
        return True

    def _settle(self, failure: Failure) -> None:
        """Decide on a failure after which the step has worked."""
        if failure.alone:
            self._dead.append(failure)
        else:
            failure.row.thorough = True
            self._call_again(failure.row)
