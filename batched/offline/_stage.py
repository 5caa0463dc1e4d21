"""Stage: a step in a run. Its rows wait in a scheduler, as calls do online, and leave it as batches
for the workers.

1. A batch is formed when a worker has room, one ahead of the one that it runs, and a full one
   waits, or nothing more is to come.
2. A row that failed with an error of the service goes to the end of the queue, `ROUNDS` times.
3. What failed in a batch of which nothing succeeded is held until the step has succeeded since: it
   may be the model that is broken, or the service.
4. After `MOST_FAILURES` such batches in a row, or once nothing more is to come and many rows are
   held, a row that is known to be good is tried alone, the sample, and its result thrown away. If
   it succeeds, the rows are at fault, and the run goes on; if it fails, the run ends, and nothing
   of what is held is committed. The sample is the first row that succeeded, in this run or in one
   before it.
5. Few rows that are held at the end, and all where there is no sample, are tried once more, row by
   row. What fails then is a dead letter if the step has worked, or if it failed in an earlier run,
   too; anything else ends the run.
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
"""Batches of each step that may be read and not yet done: enough that those of like length go
together.
"""
ROUNDS: Final = 3
"""Times that a row goes to the end of the queue after errors of the service."""
MOST_FAILURES: Final = 8
"""Batches in a row of which nothing succeeded, after which the function is in doubt."""
ENOUGH: Final = 3
"""Full batches of one size that tell what a row costs in such."""
WORTHWHILE: Final = 0.95
"""Cost of a row in a batch twice as large beside one as it is, from which on size is left alone."""


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
        self.inputs = inputs  # hash, for each step, of the columns of the source that it depends on
        self.values = values  # of the columns that steps read
        self.failed_before = failed_before  # it is a dead letter of an earlier run
        self.attempts = 0  # calls of the function of this step that it was in
        self.failed_at = 0  # batches of which some had succeeded when it failed first
        self.rounds = 0  # times that it went to the end of the queue of this step
        self.thorough = False  # it is to be tried alone whatever happens

    def copy(self) -> Row:
        """The row as it comes to a step, with values of its own."""
        return Row(self.key, self.inputs, dict(self.values), self.failed_before)


Prepared = tuple[list[Request], list[tuple[Row, BaseException]]]
"""Requests for rows, and the rows for which none could be made, each with the error."""


class Stage:
    """A step in a run; all but the work itself happens in the coordinator's thread."""

    def __init__(self, number: int, step: Step, workers: Workers, columns: Columns) -> None:
        self.number = number
        self.step = step
        self.began = False  # its workers
        self.name = step.name
        self.workers = workers
        self.columns = columns
        self._state = columns.state()  # as it is in the progress file
        parts = step.parts
        self._parse = parts.requests.parse
        self._features = parts.function.options.features is not None
        policy = parts.function.options.policy
        count = step.workers or 1  # workers
        self.scheduler = Scheduler(
            replace(
                policy,
                flush="window",  # which holds a batch until it is full
                timeout_ms=1e15,
                max_concurrent_batches=2 * count,
                prefetch=0,
                max_queue_size=None,
                queue_timeout_ms=None,
            )
        )
        # rows that may be read and not yet done
        self.limit = max(AHEAD, 2 * count + 1) * policy.batch_size
        # those, however large they are, that keep the workers busy
        self.least = (1 + count) * policy.batch_size
        # Batches of items that may be prepared and not yet run: what `preprocess` makes is often
        # far larger than the row, as images are than their paths. For lengths, all are looked at.
        varies = parts.function.options.length is not None or self._features
        self._prepared = self.limit // policy.batch_size if varies else 2 * count + 1
        self._auto = None if not isinstance(step.batch_size, Auto) else _AutoSize(step.batch_size)
        if self._auto:
            self.scheduler.capacity.batch_size = self._auto.size
        self.prepares = step.preprocess is not None
        self.open = 0  # rows that have come and neither gone on nor failed
        self.unprepared: deque[Row] = deque()  # of them, those that wait to be prepared
        self.preparing = 0  # those that are prepared beside the batches
        # those that are finished beside the batches, wait to be committed, or are tried as a sample
        self.elsewhere = 0
        self.done: list[Row] = []  # those that wait to be committed
        self.results: list[Any] = []  # of them
        self.committed = -math.inf  # moment of the last commit (s)
        self.held: list[tuple[Row, BaseException]] = []  # failures of batches without a success
        self.failures = 0  # such batches in a row
        self.successes = 0  # batches of which some succeeded
        self.sample: Row | None = None  # one that has succeeded
        self.probe: Batch | None = None  # under way, to try the sample
        self.doubt = ""  # why
        # dead letters in a row, after the last of which the function is in doubt, too
        self.useless, self.most_useless = 0, MOST_FAILURES * policy.batch_size
        self.ok = self.failed = self.batches = 0
        self.seconds = 0.0  # time of the function (s)

    # before the function

    @property
    def may_prepare(self) -> bool:
        """Whether more items are to be made."""
        made = self.scheduler.waiting + self.preparing
        return bool(self.unprepared) and made < self._prepared * self.scheduler.capacity.batch_size

    @property
    def expects(self) -> bool:
        """Whether rows of it are still to come to its queue."""
        return bool(self.preparing or self.unprepared)

    def item_of(self, row: Row) -> Any:
        """What the columns hold for `row`: a value, or a dict of several."""
        inputs = self.step.inputs
        if len(inputs) == 1 and not self._features:
            return row.values[inputs[0]]
        return {name: row.values[name] for name in inputs}

    def prepare(self, rows: Sequence[Row], caught: type[BaseException] = Exception) -> Prepared:
        """Requests for `rows`, whose wakers are the rows; errors of the others. Runs code of the
        user's.
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
        # further ones, the same for all rows, are given where the function is called
        args = () if step.route is None else (step.route(value),)
        if step.preprocess is not None:
            value = step.preprocess(value)
        elif self._features:
            import numpy

            value = {name: numpy.asarray(each)[None] for name, each in value.items()}
        return self._parse(value, args, {}, None, row, True)

    def take(self, now: float, *, drain: bool) -> Batch | None:
        """The next batch; None: not yet. `drain`: what waits is all there is."""
        scheduler = self.scheduler
        if self.probe is not None or not scheduler.has_room or not scheduler.waiting:
            return None
        scheduler.draining = drain
        return scheduler.take(now)

    def submit(self, batch: Batch) -> None:
        if not self.began:  # until then a model need not be built
            self.began = True
            self.workers.start()
        thorough = any(request.waker.thorough for request, _, _ in batch.slices)
        self.workers.submit(batch, thoroughly=thorough)

    def try_sample(self, request: Request, doubt: str) -> None:
        """Has a worker run the sample alone; until that has ended, no batch is formed."""
        self.doubt = doubt
        self.probe = Batch([(request, 0, 1)], 1, "drain", request.arrived, request.longest)
        self.elsewhere += 1
        self.submit(self.probe)

    def end_probe(self) -> list[tuple[Row, BaseException]]:
        """Failures that are to be judged, as the sample has succeeded."""
        self.failures = self.useless = 0
        held, self.held = self.held, []
        return held

    # after the function

    def note_end(self, done: Done, now: float) -> None:
        """Counts a batch that has ended, and gives its worker to the next one."""
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
        """The result for one row, of what the collator split off for it."""
        if self._features:
            arrays = [array[0] for _, array in tree_flatten(output)]
            output = tree_unflatten(output, iter(arrays))
        return output

    def results_of(self, outputs: list[Any]) -> list[Any]:
        """Results for several rows."""
        return list(map(self.result_of, outputs)) if self._features else outputs

    def finish(self, output: Any) -> Any:
        """The result to keep. Runs code of the user's."""
        result = self.result_of(output)
        return result if self.step.postprocess is None else self.step.postprocess(result)

    def new_notes(self) -> dict[str, Any]:
        """State of the columns, to be committed with the rows for which it has changed."""
        state = self.columns.state()
        return {} if state == self._state else {f"columns {self.number}": state}

    def note_queued(self, notes: Mapping[str, Any]) -> None:
        """Counts notes as saved, which are to be committed."""
        self._state = notes.get(f"columns {self.number}", self._state)

    @property
    def idle(self) -> bool:
        """Whether nothing of it is under way; rows may be held."""
        return not (self.expects or self.scheduler.waiting or self.busy)

    @property
    def busy(self) -> bool:
        """Whether an end of something under way will be told."""
        return bool(self.scheduler.in_flight or self.preparing or self.elsewhere)


class _AutoSize:
    """Batch size that grows for as long as that makes a row cheaper."""

    def __init__(self, limits: Auto) -> None:
        self.size = self._least = limits.least  # of a full batch
        self._most = limits.most
        self._times = TimeBySize()
        self._full = 0  # batches of this size so far; -1: the size is found
        self._before = math.inf  # what a row cost in batches of half the size (s)

    def next(self, size: int, seconds: float) -> int:
        """Size of a full batch after one of `size` that took `seconds`."""
        if size != self.size or self._full < 0:
            return self.size
        self._times.add(size, seconds)
        self._full += 1
        if self._full < ENOUGH:
            return self.size
        cost = self._times.time(size) / size
        if cost > WORTHWHILE * self._before or size == self._most:
            self._full = -1  # found
            if cost > self._before:
                self.size = max(size // 2, self._least)
        else:
            self._before, self._full = cost, 0
            self.size = min(2 * size, self._most)
        return self.size
