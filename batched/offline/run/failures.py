"""Failures of one step: which rows are called again, which are dead letters, and when a run ends.

The module has no thread, clock or I/O. The rules:

1. An error of a service is retried, up to `Retry.attempts` calls of the row. The row waits in a
   heap, and holds up no other. The last call searches for the rows that fail. A call counts only if
   a row of the step has succeeded since the last failure of its row. The run ends after `outage_s`
   of such failures without any success.
2. A row that has failed for good is held until a row succeeds. Then it is a dead letter.
3. The step is in doubt if a batch was given up; if `FIRST` rows have failed for good and none has
   worked in this run, or `LATER` rows in a row; and if only rows that have failed are left. It then
   gets no batch, only trials of one row: the probe, which is a row that has worked before, or else
   rows from different places. A success ends the doubt, and the rows of the batch are searched.
4. The run ends if the probe fails `PROBES` times by its own error, or if no row ever worked and
   `FIRST` trials have failed so. Held rows are not committed then: the next run calls them again.
5. If no row is left to try, all held rows are dead letters.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..._services.failures import error_text
from ..engines.engine import GivenUp
from ..retry import Retry

_logger = logging.getLogger("batched")

FIRST: Final = 16
"""Failures after which a step is in doubt, or counts as broken, if none of its rows has worked."""
LATER: Final = 256
"""Failures in a row after which a step is in doubt, if rows have worked in this run."""
PROBES: Final = 3
"""Failed trials of the probe after which a step counts as broken."""
TRIAL_S: Final = 0.1
"""Shortest time from a failed trial of the probe to the next (s)."""
USELESS: Final = 256
"""Rows in a row that fail outside the function, after which the run ends."""
LOG_S: Final = 5.0
"""Time without an answer of a service after which a warning says so (s)."""
SPREAD: Final = 0.618
"""Step between trials as a share of the rows: multiples of the golden ratio spread most evenly."""


@dataclass(slots=True, eq=False)
class Row:
    """One row in one step."""

    key: str | int
    inputs: tuple[int, ...]  # hash of the source columns on which each step depends, by step
    values: dict[str, Any]  # by name of a column that steps read
    number: int = 0  # place in the source, from 0
    attempts: int = 0  # outcomes of the row
    faults: int = 0  # outcomes that were errors of a service, and count
    failed_at: float = math.inf  # when it last failed by such an error (s)
    searched: bool = False  # whether its next failure is searched to the end
    result: Any = None  # output of the function, then the result of the step

    def next(self) -> Row:
        """Return the row as the next step gets it."""
        return Row(self.key, self.inputs, dict(self.values), self.number)


Failure = tuple[Row, BaseException]
"""A row for which the function failed, and its error."""
Dead = tuple[Row, str, BaseException | str]
"""A row that has failed for good, the phase in which it did, and its error or the reason."""


def text_of(error: BaseException | str) -> tuple[str, str]:
    """Return the text of an error, or of a reason, and the lines of its traceback."""
    return (error, "") if isinstance(error, str) else error_text(error)


@dataclass
class Failures:
    """Judge of the failures of one step."""

    name: str
    retry: Retry
    outage_s: float
    once: bool = False  # whether each row is a batch, and is called once
    probe: Row | None = None  # a row that has worked, in this run or an earlier one
    doubt: bool = False
    trial: Row | None = None  # row that is being tried
    trial_at: float = -math.inf  # moment of the next trial (s)
    stopped: tuple[str, BaseException | str] | None = None  # reason for which the run ends
    held: list[Failure] = field(default_factory=list)  # failed for good, before a success
    dead: list[Dead] = field(default_factory=list)  # rows that are dead letters
    failed: int = 0  # rows that failed for good since the last success
    # rows to be called again, as a heap: from which moment (s), number in the source, the row
    _retries: list[tuple[float, int, Row]] = field(default_factory=list)
    _worked: bool = False  # whether a row has worked in this run
    _last_success: float = -math.inf  # (s)
    _silent_since: float = math.inf  # moment of the first failure since the last success (s)
    _trials: int = 0  # of this doubt
    _tried: int = 0  # trials of this doubt that failed by the row's own error
    outside: int = 0  # rows in a row that failed outside the function
    _warned: bool = False  # whether the outage was logged

    def moment(self, now: float) -> float:
        """Return the next moment at which a row is due (s); infinite if an event comes first."""
        retry = self._retries[0][0] if self._retries else math.inf
        return min(retry, self.trial_at if self.trial_at > now else math.inf)

    def take_due(self, now: float) -> list[Row]:
        """Remove and return the rows to be called again now."""
        rows = []
        while self._retries and self._retries[0][0] <= now:
            rows.append(heapq.heappop(self._retries)[2])
        return rows

    def note(self, failures: Sequence[Failure], *, worked: bool, now: float) -> None:
        """Judge outcomes of a batch. `worked`: whether a row of it has succeeded."""
        if worked:
            self._succeed(now)
        elif failures:
            self._silent_since = min(self._silent_since, now)
        for row, error in failures:
            given_up = isinstance(error, GivenUp)
            error = error.error if isinstance(error, GivenUp) else error
            if row is self.probe:
                self._note_probe(error, now)
            elif self.retry.is_service_fault(error):
                self._note_fault(row, error, now)
            elif given_up:
                row.searched = True
                heapq.heappush(self._retries, (now, row.number, row))
                if not worked:
                    self.doubt = True
            else:
                self.held.append((row, error))
                self.failed += 1
                self._tried += row is self.trial
                if self._tried >= FIRST:
                    self._stop(error)
        if worked:
            self._bury()
        elif self.failed >= (LATER if self._worked else FIRST):
            self.doubt = True

    def _note_fault(self, row: Row, error: BaseException, now: float) -> None:
        """Note that the service has failed for a row."""
        row.faults += row.failed_at > now or self._last_success > row.failed_at
        row.failed_at = now
        most = self.retry.attempts
        if self.once or (row.searched and row.faults >= most):
            self.held.append((row, error))
            return
        row.searched = row.searched or row.faults >= most - 1
        moment = now + self.retry.wait(row.attempts, error)
        heapq.heappush(self._retries, (moment, row.number, row))
        if row is self.trial:
            self.trial_at = moment
        self._note_outage(error, now)

    def _note_outage(self, error: BaseException, now: float) -> None:
        silent = now - min(self._silent_since, now)
        if silent >= self.outage_s:
            self.stopped = f"has not succeeded for {silent:,.0f} s", error
        elif silent >= LOG_S and not self._warned:
            self._warned = True
            _logger.warning(
                "step %r has not succeeded for %.0f s, and waits for its service, %g s at most: %s",
                *(self.name, silent, self.outage_s, error_text(error).error),
            )

    def _note_probe(self, error: BaseException, now: float) -> None:
        if self.retry.is_service_fault(error):
            self._note_outage(error, now)
        else:
            self._tried += 1
            if self._tried >= PROBES:
                self.stopped = "fails even for a row that it has computed before", error
        self.trial_at = now + max(TRIAL_S, self.retry.wait(self._trials, error))

    def note_outside(self, errors: Sequence[BaseException | str], *, worked: bool) -> None:
        """Count rows that failed outside the function. `worked`: whether others have results."""
        self.outside = 0 if worked else self.outside + len(errors)
        if self.outside >= USELESS:
            self.stopped = "has no result for any of the last rows", errors[-1]

    def doubt_rest(self) -> None:
        """Note that only rows that have failed are left, and those that wait for their service."""
        if self.held or (self._retries and self.probe and self._silent_since < math.inf):
            self.doubt = True

    def pick(self, waiting: deque[Row]) -> Row | None:
        """Return the row to try: the probe, or one of those that wait, which is removed."""
        self._trials += 1
        self.trial = self.probe
        if self.trial is None and waiting:
            waiting.rotate(-int(SPREAD * len(waiting)))
            self.trial = waiting.popleft()
        return self.trial

    def give_up(self) -> None:
        """Make all rows that are held dead letters, because no row is left to try."""
        if self.held and self.failed >= FIRST:
            self._stop(self.held[-1][1])
        elif not self._retries:
            self._bury()
            self.doubt = False

    def _stop(self, error: BaseException) -> None:
        self.stopped = f"has never succeeded, in {self.failed} rows tried one by one", error

    def _bury(self) -> None:
        self.dead += [(row, "inference", error) for row, error in self.held]
        self.held = []

    def _succeed(self, now: float) -> None:
        self._worked, self._last_success, self._silent_since = True, now, math.inf
        self.doubt = self._warned = False
        self.trial_at = -math.inf
        self.failed = self._trials = self._tried = 0
