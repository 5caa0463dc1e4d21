"""Failures of one step: which rows are called again, which are dead letters, and when a run ends.

The module has no thread, clock or I/O. The rules:

1. An error of a service is retried, up to `Retry.attempts` calls of the row. The row waits in a
   heap, and holds up no other. Before the last call, which searches for the rows that fail,
   another row must have succeeded since the row failed; else the row is held.
2. A row that has failed for good is held until a row succeeds. Then it is a dead letter or, if it
   failed only together with other rows, it is called once more in a search.
3. The step is in doubt if a batch is given up, and nothing has succeeded since it began; if `FIRST`
   rows have failed and none has succeeded in this run, or `LATER` rows in a row; if a service has
   failed in `FIRST` batches in a row; or if only held rows are left. It then gets no batch, only
   trials of one row: the probe, which is a row that has worked before, or else rows from different
   places. A success ends the doubt.
4. If a trial fails by an error of the service, there is an outage, and no call of the held rows
   counts. The run ends after `outage_s` without a success.
5. The run ends if the probe fails `PROBES` times by its own error, or if no row ever worked and
   `FIRST` trials have failed so. Held rows are not committed then: the next run calls them again.
6. If no row is left to try, all held rows are dead letters.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from ..._services.failures import error_text
from ..engines.engine import Failed
from ..retry import Retry

_logger = logging.getLogger("batched")

FIRST: Final = 16
"""Failures after which a step is in doubt, or counts as broken, if none of its rows has worked."""
LATER: Final = 256
"""Failures in a row after which a step is in doubt, if rows have worked in this run."""
PROBES: Final = 3
"""Failed trials of the probe after which a step counts as broken."""
TRIAL_S: Final = 0.1
"""Shortest time from a failed trial of the probe, or of a service, to the next (s)."""
LOG_S: Final = 5.0
"""Time without an answer of a service after which a warning says so (s)."""
SPREAD: Final = (math.sqrt(5) - 1) / 2
"""Step between trials as a share of the rows: multiples of it spread most evenly."""


class Row:
    """One row on its way through the steps."""

    __slots__ = (
        "attempts",
        "failed_at",
        "faults",
        "inputs",
        "isolating",
        "key",
        "number",
        "result",
        "values",
    )

    def __init__(
        self, key: str | int, inputs: tuple[int, ...], values: dict[str, Any], number: int = 0
    ) -> None:
        self.key = key
        self.inputs = inputs  # hash of the source columns on which each step depends, by step
        self.values = values  # by name of a column that steps read
        self.number = number  # place in the source, from 0
        self.attempts = 0  # outcomes of the row in this step
        self.faults = 0  # outcomes that were errors of a service
        self.failed_at = -math.inf  # when it last failed by an error of a service (s)
        self.isolating = False  # whether its next failure is searched to the end
        self.result: Any = None  # output of this step's function, then the result of the step

    def start_step(self) -> None:
        """Reset the counts, for the next step."""
        self.attempts = self.faults = 0
        self.failed_at = -math.inf
        self.isolating = False
        self.result = None

    def copy(self) -> Row:
        """Return a copy with its own dict of values, which later steps do not change."""
        return Row(self.key, self.inputs, dict(self.values), self.number)


Failure = tuple[Row, BaseException]
"""A row for which the function failed, and its error."""


class Failures:
    """Judge of the failures of one step."""

    def __init__(self, name: str, retry: Retry, outage_s: float) -> None:
        self._name = name
        self._retry = retry
        self._outage_s = outage_s
        self.probe: Row | None = None  # a row that has worked, in this run or an earlier one
        self.doubt = False
        self.trial_at = 0.0  # moment of the next trial (s)
        self.stopped: tuple[str, BaseException] | None = None  # reason for which the run ends
        # failures without a verdict, each with whether the row has failed for good
        self.held: list[tuple[Row, BaseException, bool]] = []
        self.dead: list[Failure] = []  # failures of dead letters
        # rows to be called again, as a heap: from which moment (s), number in the source, the row
        self._retries: list[tuple[float, int, Row]] = []
        self._worked = False  # whether a row has worked in this run
        self._last_success = -math.inf  # (s)
        self._silent_since = math.inf  # moment of the first failure since the last success (s)
        # since the last success: rows that failed by their own errors, failures of a service
        self.alone = self._refused = 0
        # of this doubt: trials; failures of rows and of the probe by their own errors; failures of
        # the service
        self._trials = self._tried = self._probe_errors = self._outages = 0
        self._told = False  # whether the outage was logged

    @property
    def pending(self) -> int:
        """Rows without a verdict."""
        return len(self.held) + len(self._retries)

    def next_moment(self) -> float:
        """Return the moment at which a row is to be called again (s); infinite if none is."""
        return self._retries[0][0] if self._retries else math.inf

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
        refused = 0
        for row, error in failures:
            final, began = True, None
            if isinstance(error, Failed):
                final, began, error = error.alone, error.began, error.error
            if self._retry.is_service_fault(error):
                refused = 1
                final = final and row.isolating
                row.faults += 1
                answers, row.failed_at = worked or self._last_success > row.failed_at, now
                row.isolating = row.faults == self._retry.attempts - 1
                if row.faults < self._retry.attempts - (not answers):
                    self._call_again(row, now + self._retry.wait(row.faults, error))
                    continue
            elif final:
                self.alone += 1
            elif began is not None and self._last_success < began:
                self._begin_doubt(now)
            self.held.append((row, error, final))
        if worked:
            self._settle(outage=False)
            return
        self._refused += refused
        if self.alone >= (LATER if self._worked else FIRST) or self._refused >= FIRST:
            self._begin_doubt(now)

    def _begin_doubt(self, now: float) -> None:
        if not self.doubt:
            self.doubt = True
            self.trial_at = now

    def doubt_held(self, now: float) -> None:
        """Note that only held rows are left."""
        if self.held:
            self._begin_doubt(now)

    def pick(self, waiting: deque[Row]) -> Row | None:
        """Return the row to try: the probe, or one that is held or `waiting`, which is removed."""
        if self.probe is not None:
            return self.probe
        is_service = self._retry.is_service_fault
        places = [
            n for n, (_, error, final) in enumerate(self.held) if is_service(error) or not final
        ]
        size = len(places) + len(waiting)
        if not size:
            return None
        self._trials += 1
        place = int(self._trials * SPREAD % 1 * size)
        if place < len(places):
            return self.held.pop(places[place])[0]
        row = waiting[place - len(places)]
        del waiting[place - len(places)]
        return row

    def end_trial(self, row: Row, error: BaseException | None, now: float) -> None:
        """Note how the trial of `row` has ended."""
        if error is None:
            outage = self._outages > 0
            self._succeed(now)
            self._settle(outage=outage)
            return
        error = error.error if isinstance(error, Failed) else error
        is_probe, is_service = row is self.probe, self._retry.is_service_fault(error)
        if not is_probe:
            self.held.append((row, error, True))
        if is_service:
            self._outages += 1
            silent = now - min(self._silent_since, now)
            if silent >= self._outage_s:
                self.stopped = f"has not succeeded for {silent:,.0f} s", error
            elif silent >= LOG_S and not self._told:
                self._told = True
                _logger.warning(
                    "step %r has not succeeded for %.0f s, and waits for its service, %g s at "
                    "most: %s",
                    *(self._name, silent, self._outage_s, error_text(error).error),
                )
        elif is_probe:
            self._probe_errors += 1
            if self._probe_errors >= PROBES:
                self.stopped = "fails even for a row that it has computed before", error
        else:
            self.alone += 1
            self._tried += 1
            if self._tried >= FIRST:
                self._stop(error)
        self.trial_at = now
        if is_service or is_probe:  # another row may be tried at once
            failed = self._outages + self._probe_errors
            self.trial_at += max(TRIAL_S, self._retry.wait(failed, error))

    def give_up(self) -> None:
        """Make all rows that are held dead letters, because no row is left to try."""
        if self.held and self.alone >= FIRST:
            self._stop(self.held[-1][1])
        else:
            self.dead += [(row, error) for row, error, _ in self.held]
            self.held, self.doubt = [], False

    def _stop(self, error: BaseException) -> None:
        self.stopped = f"has never succeeded, in {self.alone} rows tried one by one", error

    def _call_again(self, row: Row, moment: float = -math.inf) -> None:
        heapq.heappush(self._retries, (moment, row.number, row))

    def _succeed(self, now: float) -> None:
        self._worked, self._last_success, self._silent_since = True, now, math.inf
        self.doubt = self._told = False
        self.alone = self._refused = 0
        self._trials = self._tried = self._probe_errors = self._outages = 0

    def _settle(self, *, outage: bool) -> None:
        """Decide on held rows after a success. `outage`: their calls do not count."""
        held, self.held = self.held, []
        for row, error, final in held:
            if outage and self._retry.is_service_fault(error):
                row.faults, row.isolating = 0, False
            elif final:
                self.dead.append((row, error))
                continue
            else:
                row.isolating = True
            self._call_again(row)
