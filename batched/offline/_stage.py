"""Stage: one step of a run. Rows wait in a scheduler, as online calls do, and leave in batches.

1. A batch is formed when a worker has room: one batch runs and one waits. The batch must be full,
   unless no more rows will come.
2. A row that failed with a service error returns to the end of the queue, up to `ROUNDS` times.
3. If no row of a batch succeeds, its rows are held until the step succeeds again, because the model
   or the service may be broken.
4. After `MOST_FAILURES` batches in a row without a success, a worker runs the sample alone. The
   same happens at the end of the source if many rows are held. The sample is the first row that
   succeeded, in this run or an earlier one; its new result is discarded. If the sample succeeds,
   the held rows are at fault and the run goes on. If it fails, the run ends and no held row is
   committed.
5. At the end of the source, held rows are retried once, row by row, if they are few or there is no
   sample. A row that fails again is a dead letter if the step has succeeded, or if the row also
   failed in an earlier run. Otherwise the run ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from .._collate.outputs import tree_flatten, tree_unflatten
from .._core.cost import TimeBySize
from .._core.scheduler import Batch, Request, Scheduler
from ._batch_run import Done
from ._columns import Columns
from ._keys import Key
from ._step import Auto, Step
from ._worker import Workers

AHEAD: Final = 33
"""Batches of each step that may be read and not yet done; enough to group similar lengths."""
ROUNDS: Final = 3
"""Times that a row returns to the end of the queue after service errors."""
MOST_FAILURES: Final = 8
"""Batches in a row without a success, after which the function is in doubt."""
ENOUGH: Final = 3
"""Full batches of one size that are measured to know the cost of a row."""
WORTHWHILE: Final = 0.95
"""Ratio of a row's cost after doubling the batch to the cost before; above it, growth stops."""


class Row:
    """One row on its way through the steps."""

    __slots__ = (
        "attempts",
        "failed_at",
        "failed_before",
        "inputs",
        "key",
        "rounds",
        "thorough",
        "values",
    )

    def __init__(
        self, key: Key, inputs: tuple[int, ...], values: dict[str, Any], failed_before: bool
    ) -> None:
        self.key = key
        self.inputs = inputs  # for each step, hash of the source columns that it depends on
        self.values = values  # by name of a column that steps read
        self.failed_before = failed_before  # the row is a dead letter of an earlier run
        self.attempts = 0  # calls of this step's function with the row
        self.failed_at = 0  # the stage's `successes` when the row failed first
        self.rounds = 0  # times that the row returned to the end of this step's queue
        self.thorough = False  # a failing batch of the row must be isolated to the end

    def copy(self) -> Row:
        """Return a copy for another step, with its own dict of values."""
        return Row(self.key, self.inputs, dict(self.values), self.failed_before)


Prepared = tuple[list[Request], list[tuple[Row, BaseException]]]
"""Requests for rows, and the rows that failed to become requests, with their errors."""


class Stage:
    """One step of a run. Only the work itself happens outside the coordinator's thread."""

    def __init__(self, number: int, step: Step, workers: Workers, columns: Columns) -> None:
        self.number = number
        self.step = step
        self.began = False  # whether the workers were started
        self.name = step.name
        self.workers = workers
        self.columns = columns
        self._state = columns.state()  # as saved in the progress file
        parts = step.parts
        self._parse = parts.requests.parse
        self._features = parts.function.options.features is not None
        policy = parts.function.options.policy
        count = step.workers or 1  # number of workers
        self.scheduler = Scheduler(
            replace(
                policy,
                flush="window",  # hold a batch until it is full
                timeout_ms=1e15,
                max_concurrent_batches=2 * count,
                prefetch=0,
                max_queue_size=None,
                queue_timeout_ms=None,
            )
        )
        # most rows that are read and not yet done
        self.limit = max(AHEAD, 2 * count + 1) * policy.batch_size
        # rows that keep the workers busy; read even if they are large
        self.least = (1 + count) * policy.batch_size
        # Batches of items that may be prepared and not yet run. The output of `preprocess` is often
        # far larger than the row: an image and its path. Items with a length are all prepared.
        varies = parts.function.options.length is not None or self._features
        self._prepared = self.limit // policy.batch_size if varies else 2 * count + 1
        self._auto = None if not isinstance(step.batch_size, Auto) else _AutoSize(step.batch_size)
        if self._auto:
            self.scheduler.capacity.batch_size = self._auto.size
        self.prepares = step.preprocess is not None
        self.open = 0  # rows that have arrived, and have neither succeeded nor failed
        self.unprepared: deque[Row] = deque()  # open rows that wait to be prepared
        self.preparing = 0  # rows that are being prepared
        # rows that are being postprocessed, that wait for a commit, or that run as the sample
        self.elsewhere = 0
        self.done: list[Row] = []  # rows that wait for the next commit
        self.results: list[Any] = []  # of the rows in `done`
        self.committed = -math.inf  # moment of the last commit (s)
        self.held: list[tuple[Row, BaseException]] = []  # failed rows of batches without a success
        self.failures = 0  # batches in a row without a success
        self.successes = 0  # batches with a success
        self.sample: Row | None = None  # row that has succeeded
        self.probe: Batch | None = None  # batch under way that runs the sample
        self.doubt = ""  # reason for the probe
        # dead letters in a row, and their number after which the function is in doubt
        self.useless, self.most_useless = 0, MOST_FAILURES * policy.batch_size
        self.ok = self.failed = self.batches = 0
        self.seconds = 0.0  # time of the function (s)

    # before the function

    @property
    def may_prepare(self) -> bool:
        """Whether more rows may be prepared now."""
        made = self.scheduler.waiting + self.preparing
        return bool(self.unprepared) and made < self._prepared * self.scheduler.capacity.batch_size

    @property
    def expects(self) -> bool:
        """Whether more rows will enter the queue."""
        return bool(self.preparing or self.unprepared)

    def item_of(self, row: Row) -> Any:
        """Return the item for `row`: the value of one column, or a dict of columns."""
        inputs = self.step.inputs
        if len(inputs) == 1 and not self._features:
            return row.values[inputs[0]]
        return {name: row.values[name] for name in inputs}

    def prepare(self, rows: Sequence[Row], caught: type[BaseException] = Exception) -> Prepared:
        """Return requests for `rows`, and the failed rows with their errors.

        The waker of a request is its row. The method calls the user's code.
        """
        requests: list[Request] = []
        failed: list[tuple[Row, BaseException]] = []
        for row in rows:
            try:
                requests.append(self._prepare(row))
            except caught as error:
                failed.append((row, error))
        return requests, failed

    def _prepare(self, row: Row) -> Request:
        step = self.step
        value = self.item_of(row)
        # arguments that are the same for all rows are added when the function is called
        args = () if step.route is None else (step.route(value),)
        if step.preprocess is not None:
            value = step.preprocess(value)
        elif self._features:
            import numpy

            value = {name: numpy.asarray(each)[None] for name, each in value.items()}
        return self._parse(value, args, {}, None, row, True)

    def take(self, now: float, *, drain: bool) -> Batch | None:
        """Return the next batch, or None if none may leave yet. `drain`: no more rows will come."""
        scheduler = self.scheduler
        if self.probe is not None or not scheduler.has_room or not scheduler.waiting:
            return None
        scheduler.draining = drain
        return scheduler.take(now)

    def submit(self, batch: Batch) -> None:
        if not self.began:  # workers start late, because they may build a model
            self.began = True
            self.workers.start()
        thorough = any(request.waker.thorough for request, _, _ in batch.slices)
        self.workers.submit(batch, thoroughly=thorough)

    def try_sample(self, request: Request, doubt: str) -> None:
        """Run the sample alone on a worker. No batch is formed until the sample has ended."""
        self.doubt = doubt
        self.probe = Batch([(request, 0, 1)], 1, "drain", request.arrived, request.longest)
        self.elsewhere += 1
        self.submit(self.probe)

    def end_probe(self) -> list[tuple[Row, BaseException]]:
        """Return the held failures to be judged, after the sample has succeeded."""
        self.failures = self.useless = 0
        held, self.held = self.held, []
        return held

    # after the function

    def note_end(self, done: Done, now: float) -> None:
        """Count a batch that has ended, and release its worker."""
        batch = done.batch
        assert batch is not None
        batch.started = now - done.seconds
        self.scheduler.finished(batch, now)
        self.batches += 1
        self.seconds += done.seconds
        if self._auto and batch.fitted and batch.attempts == 1:
            self.scheduler.capacity.batch_size = self._auto.next(batch.size, done.seconds)
        if done.alive:
            self.failures = 0
            self.successes += 1
        else:
            self.failures += 1

    def result_of(self, output: Any) -> Any:
        """Return the result for one row from its part of the output."""
        if self._features:
            arrays = [array[0] for _, array in tree_flatten(output)]
            output = tree_unflatten(output, iter(arrays))
        return output

    def results_of(self, outputs: list[Any]) -> list[Any]:
        """Return the results for several rows."""
        return list(map(self.result_of, outputs)) if self._features else outputs

    def finish(self, output: Any) -> Any:
        """Return the result to keep for one row. The method calls the user's code."""
        result = self.result_of(output)
        return result if self.step.postprocess is None else self.step.postprocess(result)

    def new_notes(self) -> dict[str, Any]:
        """Return the state of the columns, if changed, to be committed with the rows."""
        state = self.columns.state()
        return {} if state == self._state else {f"columns {self.number}": state}

    def note_queued(self, notes: Mapping[str, Any]) -> None:
        """Treat notes that will be committed as saved."""
        self._state = notes.get(f"columns {self.number}", self._state)

    @property
    def idle(self) -> bool:
        """Whether no row is under way. Held rows do not count."""
        return not (self.expects or self.scheduler.waiting or self.busy)

    @property
    def busy(self) -> bool:
        """Whether a batch, a preparation or a row elsewhere is still to end."""
        return bool(self.scheduler.in_flight or self.preparing or self.elsewhere)


class _AutoSize:
    """Batch size that doubles for as long as the cost of a row falls."""

    def __init__(self, limits: Auto) -> None:
        self.size = self._least = limits.least  # items of a full batch
        self._most = limits.most
        self._times = TimeBySize()
        self._full = 0  # full batches of this size so far; -1: the size is final
        self._before = math.inf  # cost of a row in batches of half the size (s)

    def next(self, size: int, seconds: float) -> int:
        """Return the size of a full batch, after a batch of `size` took `seconds`."""
        if size != self.size or self._full < 0:
            return self.size
        self._times.add(size, seconds)
        self._full += 1
        if self._full < ENOUGH:
            return self.size
        cost = self._times.time(size) / size
        if cost > WORTHWHILE * self._before or size == self._most:
            self._full = -1  # the size is final
            if cost > self._before:
                self.size = max(size // 2, self._least)
        else:
            self._before, self._full = cost, 0
            self.size = min(2 * size, self._most)
        return self.size
