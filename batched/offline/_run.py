"""Run: one source through all steps. One thread, the coordinator, owns all of its state; others
tell it what they have done through one queue.

A row enters a step, and leaves it with a result, an error, or for the end of the queue. Its result
is queued for the committer before it enters the next step, and the committer takes first what came
first: so no step is committed for a row before the one that it depends on.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from .._core.scheduler import Request
from .._runtime.observer import Observer
from ..errors import RemoteError
from ._batch_run import Done
from ._commit import Commit
from ._committer import Committer
from ._errors import describe
from ._reading import WINDOW, Plan, Reader, Reading
from ._report import DeadLetter, Snapshot, StepCounts, error_type
from ._row_threads import RowThreads
from ._stage import MOST_FAILURES, ROUNDS, Row, Stage

TICK: Final = 0.25
"""Longest time between two looks at the clock, for whoever watches (s)."""
TOGETHER: Final = 16
"""Rows that are prepared, or finished, in one task beside the batches."""
ROW_THREADS: Final = 4
"""Threads for `preprocess` and `postprocess`."""
FEW: Final = 10
"""Failed rows that a share of all must allow before it is judged, while rows are still read."""
FEW_ROWS: Final = 16
"""Rows that may fail at the end of the source without a doubt about a step that has worked."""
COMMIT_S: Final = 0.01
"""Time from one commit of a step to the next (s), for which results wait to be committed together:
those of a slow function wait for nothing, those of a fast one share chunks and transactions.
"""
COMMIT_ROWS: Final = 2048
"""Results of a step that wait for no others."""
GRACE: Final = 10.0
"""Time that running batches get when a run ends early (s)."""


@dataclass
class _Prepared:
    """Rows that have been through `preprocess`, as requests, and those that failed in it."""

    stage: Stage
    requests: list[Request]
    failed: list[tuple[Row, BaseException]]


@dataclass
class _Finished:
    """Rows that have been through `postprocess`, each with its result or an error."""

    stage: Stage
    rows: list[tuple[Row, Any]]


class Stopped(Exception):
    """The end of a run before all is done, because of an error, if there is one."""

    def __init__(self, why: str, error: BaseException | None = None) -> None:
        super().__init__(why)
        self.error = error


class Run:
    """The coordinator of one run."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        inbox: queue.SimpleQueue[Any],
        total: int | None,
        max_failed: float | None,
        watch: Callable[[Snapshot], None],
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._inbox = inbox
        self._watch = watch
        self._total = total
        self._max_failed = max_failed  # rows, or a share of all of them if below 1
        self._limit = sum([stage.limit for stage in stages])  # rows under way
        self._asked = 0  # windows
        self._reading = True
        self._ended = False  # nothing enters a step any more
        self.read = self.skipped = self.recomputed = self.committed = 0  # rows
        self._failed = 0  # rows
        # to be committed with the first rows: the result will not be that of all that is committed
        self._notes: dict[str, Any] = {"merged": None}
        # rows that are to enter a step again, and when (s)
        self._later: list[tuple[float, Stage, list[Row]]] = []
        self.errors: Counter[str] = Counter()  # of dead letters, by type
        self._examples: dict[str, DeadLetter] = {}  # the first of each type
        self._began = self._watched = time.perf_counter()
        self._observers = [
            None
            if (hook := stage.step.parts.function.options.on_batch) is None
            else Observer(stage.name, hook)
            for stage in stages
        ]
        needed = any(stage.prepares or stage.step.postprocess for stage in stages)
        self._row_threads = RowThreads(ROW_THREADS if needed else 0, "batched-rows")

    def execute(self, reader: Reader, committer: Committer) -> None:
        """Runs all rows through all steps.

        Raises:
            Stopped: the budget is spent, or nothing succeeds any more.
            Exception: of the source, of a class that cannot be built, or of the progress file.
        """
        self._committer = committer
        with ExitStack() as ends:  # each of which comes, also if Ctrl-C is pressed in another
            ends.callback(self._save_rest)
            ends.callback(self._row_threads.close, GRACE)
            for stage in reversed(self._stages):
                ends.callback(stage.workers.close, GRACE)
            ends.callback(reader.close)
            ends.enter_context(_interrupts(self._inbox.put))
            reader.start()
            self._loop(reader)

    def check_results(self) -> None:
        """Stops the run if it has computed nothing but failures, and there is nothing else."""
        if self._failed and not self.skipped and not self._stages[-1].ok:
            errors = ", ".join(f"{count:,} x {name}" for name, count in self.errors.items())
            raise Stopped(f"none of the {self.read:,} rows has a result: {errors}")

    def snapshot(self) -> Snapshot:
        """What is known now."""
        return Snapshot(
            total=self._total if self._reading else self.read,
            read=self.read,
            skipped=self.skipped,
            recomputed=self.recomputed,
            seconds=time.perf_counter() - self._began,
            steps=tuple(
                StepCounts(
                    stage.name, stage.ok, stage.failed, stage.open, stage.batches, stage.seconds
                )
                for stage in self._stages
            ),
            errors=dict(self.errors),
            examples=dict(self._examples),
        )

    def _loop(self, reader: Reader) -> None:
        while True:
            open_rows = sum([stage.open for stage in self._stages])
            if self._reading and not self._asked and open_rows < self._limit:
                self._asked += 1
                reader.ask()
            if not self._reading and not open_rows:
                return
            wait = self._enter_later(time.perf_counter())
            self._dispatch()
            try:
                event = self._inbox.get(timeout=max(0.0, min(wait, self._commit_due())))
            except queue.Empty:
                event = None
            now = time.perf_counter()
            if event is not None:
                self._handle(event, now)
            if now - self._watched >= TICK:
                self._watched = now
                self._watch(self.snapshot())

    def _handle(self, event: Any, now: float) -> None:
        if isinstance(event, Reading):
            self._take_in(event)
        elif isinstance(event, _Prepared):
            event.stage.preparing -= len(event.requests) + len(event.failed)
            self._admit(event.stage, event.requests, event.failed, now)
        elif isinstance(event, Done):
            self._end(event, now)
        elif isinstance(event, _Finished):
            event.stage.elsewhere -= len(event.rows)
            self._keep(event.stage, event.rows)
        else:
            raise event  # of the committer, or Ctrl-C

    # into a step

    def _take_in(self, reading: Reading) -> None:
        """Rows of a window enter the steps that they lack."""
        self._asked -= 1
        if reading.error is not None:
            raise reading.error
        self._reading = not reading.last
        if 0 < reading.size < WINDOW:  # the rows are large, or the last ones
            few = sum([stage.least for stage in self._stages])
            self._limit = min(self._limit, max(2 * reading.size, few))
        self.read += reading.size
        if reading.last:
            self._check_budget()  # what a share of all comes to is known only now
        self.skipped += reading.skipped
        self.recomputed += reading.recomputed
        for row, number in reading.samples:
            self._stages[number].sample = row
        for number, rows in enumerate(reading.rows):
            if rows:
                self._enter(self._stages[number], rows)

    def _enter(self, stage: Stage, rows: list[Row]) -> None:
        """`rows` come to `stage`."""
        if self._ended:
            return
        stage.open += len(rows)
        if not stage.prepares:
            self._admit(stage, *stage.prepare(rows), time.perf_counter())
            return
        stage.unprepared += rows

    def _prepare(self, stage: Stage, rows: list[Row]) -> None:
        """Makes requests of `rows`, in another thread."""
        self._inbox.put(_Prepared(stage, *stage.prepare(rows, BaseException)))

    def _admit(
        self,
        stage: Stage,
        requests: list[Request],
        failed: list[tuple[Row, BaseException]],
        now: float,
    ) -> None:
        """Rows wait for their batches, if their items could be made."""
        submit = stage.scheduler.submit
        for request in requests:
            submit(request, now)
        if failed:
            self._commit(stage, [], [], [(row, "preprocess", error) for row, error in failed])

    def _dispatch(self) -> None:
        """Forms all batches that may be formed now."""
        for stage in self._stages:
            while stage.may_prepare:
                count = min(TOGETHER, len(stage.unprepared))
                rows = [stage.unprepared.popleft() for _ in range(count)]
                stage.preparing += count
                self._row_threads.submit(self._prepare, stage, rows)
        busy = any(stage.busy for stage in self._stages)
        # a step that cannot fill a batch, while all that may be read is read
        stuck = not busy and not self._asked
        before = self._reading  # whether more may come to a step
        for stage in self._stages:
            drain = stuck or not (before or stage.expects)
            if drain and stage.idle and stage.held:
                self._resolve(stage)
            now = time.perf_counter()
            while (batch := stage.take(now, drain=drain)) is not None:
                if not stage.began:
                    for each in self._stages:
                        each.workers.reserve()
                stage.submit(batch)
            before = before or stage.open > 0

    # out of a step

    def _end(self, done: Done, now: float) -> None:
        """A batch has ended."""
        stage = self._stages[done.step]
        if (fatal := done.fatal) is not None:
            fatal.add_note(f"in step {stage.name!r}")
            if isinstance(fatal, RemoteError):
                fatal.add_note(fatal.lines)
            raise fatal
        batch = done.batch
        assert batch is not None
        if batch is stage.probe:
            self._end_probe(stage, done.results[0])
            return
        stage.note_end(done, now)
        observer = self._observers[done.step]
        if observer is not None:
            observer.observe(batch, (done.slices, done.results, done.tried))
        rows: list[Row] = []
        outputs: list[Any] = []
        bad: list[tuple[Row, BaseException]] = []
        for (request, _, _), output, tried in zip(
            done.slices, done.results, done.tried, strict=True
        ):
            row: Row = request.waker
            row.attempts += tried
            if isinstance(output, BaseException):
                bad.append((row, output))
            else:
                rows.append(row)
                outputs.append(output)
        if rows:
            self._finish(stage, rows, outputs)
        for row, _ in bad:
            row.thorough = done.gave_up
        if not done.alive:
            stage.held += bad
            if stage.failures >= MOST_FAILURES:
                self._doubt(
                    stage,
                    f"step {stage.name!r}: the last {stage.failures} batches failed as a whole, "
                    f"the last one with {describe(bad[-1][1])[0]}",
                )
            return
        if bad:
            self._judge(stage, bad)
        if stage.held:
            held, stage.held = stage.held, []
            self._judge(stage, held)

    def _judge(self, stage: Stage, failures: list[tuple[Row, BaseException]]) -> None:
        """Rows that failed while others succeed become dead letters, or are tried again."""
        again = [row for row, _ in failures if row.thorough]
        others = self._delay(stage, [each for each in failures if not each[0].thorough])
        if others:
            self._commit(stage, [], [], [(row, "inference", error) for row, error in others])
        if again:
            stage.open -= len(again)
            self._enter(stage, again)

    def _delay(
        self, stage: Stage, failures: list[tuple[Row, BaseException]]
    ) -> list[tuple[Row, BaseException]]:
        """Has rows that failed by the service, and not too often, enter the step again later; the
        others.
        """
        retry = stage.step.retry
        others: list[tuple[Row, BaseException]] = []
        rows: list[Row] = []
        wait = 0.0
        for row, error in failures:
            if row.rounds >= ROUNDS or not retry.is_due(error):
                others.append((row, error))
                continue
            if not row.rounds:
                row.failed_at = stage.successes
            row.rounds += 1
            row.thorough = row.rounds == ROUNDS
            rows.append(row)
            wait = max(wait, retry.wait(row.rounds, error))
        if rows:
            stage.elsewhere += len(rows)
            self._later.append((time.perf_counter() + wait, stage, rows))
        return others

    def _enter_later(self, now: float) -> float:
        """Has rows enter that have waited long enough; time that the next ones wait (s)."""
        due = [(stage, rows) for when, stage, rows in self._later if when <= now]
        self._later = [each for each in self._later if each[0] > now]
        for stage, rows in due:
            stage.elsewhere -= len(rows)
            stage.open -= len(rows)
            self._enter(stage, rows)
        return min([when - now for when, _, _ in self._later], default=TICK)

    def _doubt(self, stage: Stage, why: str) -> None:
        """Tries whether a row succeeds that is known to; without one the run ends."""
        if stage.probe is not None:
            return
        requests, _ = stage.prepare([] if stage.sample is None else [stage.sample])
        if not requests:
            raise Stopped(why, _last_error(stage))
        stage.try_sample(requests[0], why)

    def _end_probe(self, stage: Stage, output: Any) -> None:
        stage.probe = None
        stage.elsewhere -= 1
        failed = isinstance(output, BaseException)
        if failed or isinstance(_attempt(stage.finish, output), BaseException):
            raise Stopped(stage.doubt, _last_error(stage))
        self._judge(stage, stage.end_probe())

    def _resolve(self, stage: Stage) -> None:
        """Nothing more is to come that could succeed since what is held has failed."""
        dead: list[tuple[Row, str, BaseException]] = []
        held: list[tuple[Row, BaseException]] = []
        few = len(stage.held) <= FEW_ROWS
        works = stage.successes > 0 or (few and stage.sample is not None)
        for row, error in stage.held:
            # tried alone, in a step that works; by a service that has answered others since
            its_own = works and not stage.step.retry.is_due(error)
            its_own = its_own or (row.rounds >= ROUNDS and stage.successes > row.failed_at)
            if not row.thorough and (its_own or row.failed_before):
                dead.append((row, "inference", error))
            else:
                held.append((row, error))
        stage.held = held
        if dead:
            self._commit(stage, [], [], dead)
        if not held:
            return
        if stage.sample is not None and not few:
            self._doubt(stage, _nothing_succeeds(stage))
            return
        again = [row for row, _ in held if row.thorough]
        others = self._delay(stage, [each for each in held if not each[0].thorough])
        if len(others) == len(held):
            raise Stopped(_nothing_succeeds(stage), _last_error(stage))
        stage.held = others
        stage.open -= len(again)
        self._enter(stage, again)

    def _finish(self, stage: Stage, rows: list[Row], outputs: list[Any]) -> None:
        """Makes results of outputs."""
        if stage.step.postprocess is None:
            self._commit(stage, rows, stage.results_of(outputs), [])
            return
        stage.elsewhere += len(rows)
        for first in range(0, len(rows), TOGETHER):
            some = slice(first, first + TOGETHER)
            self._row_threads.submit(self._postprocess, stage, rows[some], outputs[some])

    def _postprocess(self, stage: Stage, rows: list[Row], outputs: list[Any]) -> None:
        """Makes results of outputs, in another thread."""
        results = [_attempt(stage.finish, output, BaseException) for output in outputs]
        self._inbox.put(_Finished(stage, list(zip(rows, results, strict=True))))

    def _keep(self, stage: Stage, rows: list[tuple[Row, Any]]) -> None:
        """Results of `postprocess` are committed, and their rows go on."""
        good = [(row, result) for row, result in rows if not isinstance(result, BaseException)]
        bad = [
            (row, "postprocess", error) for row, error in rows if isinstance(error, BaseException)
        ]
        self._commit(stage, [row for row, _ in good], [result for _, result in good], bad)

    def _commit(
        self,
        stage: Stage,
        rows: list[Row],
        results: list[Any],
        dead: list[tuple[Row, str, BaseException]],
    ) -> None:
        if not rows and not dead:
            return
        stage.done += rows
        stage.results += results
        stage.elsewhere += len(rows)
        due = time.perf_counter() >= stage.committed + COMMIT_S
        if dead or due or len(stage.done) >= COMMIT_ROWS:
            self._commit_now(stage, dead)

    def _commit_due(self) -> float:
        """Commits results that have waited long enough; time to wait for more events (s)."""
        wait = TICK
        for stage in self._stages:
            if stage.done:
                left = stage.committed + COMMIT_S - time.perf_counter()
                if left <= 0:
                    self._commit_now(stage, [])
                    return 0  # their rows may be due in the next step
                wait = min(wait, left)
        return wait

    def _commit_now(self, stage: Stage, dead: list[tuple[Row, str, BaseException]]) -> None:
        number = stage.number
        rows, results = stage.done, stage.results
        stage.done, stage.results = [], []
        stage.elsewhere -= len(rows)
        stage.committed = time.perf_counter()
        batch, misfits = stage.columns.encode(results) if rows else (None, {})
        notes = {**self._notes, **stage.new_notes()}
        failed = [(row, phase, *describe(error)) for row, phase, error in dead]
        if misfits:
            failed += [(rows[place], "output", why, "") for place, why in misfits.items()]
            rows = [row for place, row in enumerate(rows) if place not in misfits]
        self._committer.submit(
            Commit(
                number,
                [(row.key, row.inputs[number], row.attempts) for row in rows],
                batch,
                [
                    (row.key, row.inputs[number], row.attempts, _letter(phase, text, lines))
                    for row, phase, text, lines in failed
                ],
                notes,
            )
        )
        self._notes = {}  # only now: Ctrl-C may end the wait for the committer
        stage.note_queued(notes)
        stage.ok += len(rows)
        stage.open -= len(rows) + len(failed)
        stage.useless = 0 if rows else stage.useless + len(failed)
        # the first rows of all may still be on their way to the function
        coming = stage.sample is None and (stage.scheduler.waiting or stage.scheduler.in_flight)
        if stage.useless > stage.most_useless and not coming:
            self._doubt(
                stage,
                f"step {stage.name!r}: the last {stage.useless:,} rows all failed, the last one "
                f"with {failed[-1][2]}",
            )
        if rows and stage.sample is None:
            stage.sample = rows[0].copy()  # as it is read here: a later step may replace a column
        if failed:
            stage.failed += len(failed)
            self._failed += len(failed)
            for row, phase, text, lines in failed:
                kind = error_type(phase, text)
                self.errors[kind] += 1
                self._examples.setdefault(
                    kind,
                    {
                        "key": row.key,
                        "step": stage.name,
                        "phase": phase,
                        "error": text,
                        "attempts": row.attempts,
                        "traceback": lines,
                    },
                )
            self._check_budget()
        if rows and number + 1 < len(self._stages):
            needed = self._plan.needed[number]
            made = stage.columns.decode(batch) if needed else [{}] * len(rows)
            for row, values in zip(rows, made, strict=True):
                for name in needed:
                    row.values[name] = values[name]
                row.attempts = row.rounds = 0
            self._enter(self._stages[number + 1], rows)

    def _check_budget(self) -> None:
        most = self._max_failed
        if most is None:
            return
        allowed = most
        if 0 < most < 1:
            known = self._total if self._reading else self.read
            allowed = most * known if known is not None else max(most * self.read, FEW)
        if self._failed > allowed:
            rows = "row has" if self._failed == 1 else "rows have"
            raise Stopped(f"{self._failed:,} {rows} failed, and max_failed is {most:g}")

    def _save_rest(self) -> None:
        """Commits what had a result when the run ended."""
        self._ended = True
        while True:
            try:
                event = self._inbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, _Finished):
                stage, rows = event.stage, event.rows
            elif isinstance(event, Done) and event.fatal is None:
                stage = self._stages[event.step]
                if event.batch is stage.probe:  # of a row that is committed
                    continue
                rows = [
                    (request.waker, _attempt(stage.finish, result))
                    for (request, _, _), result in zip(event.slices, event.results, strict=True)
                    if not isinstance(result, BaseException)
                ]
            else:
                continue
            if good := [each for each in rows if not isinstance(each[1], BaseException)]:
                with suppress(Stopped):  # it has ended, for a reason of its own
                    self._keep(stage, good)
        for stage in self._stages:
            if stage.done:
                with suppress(Stopped):
                    self._commit_now(stage, [])


@contextmanager
def _interrupts(tell: Callable[[BaseException], None]) -> Iterator[None]:
    """Time in which Ctrl-C is an event; raised between two instructions, it would lose results
    that are just taken from the queue. A second one is raised where it comes.
    """

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, raises)
        tell(KeyboardInterrupt())

    raises = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not raises:  # the program has its own way
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, raises)


def _attempt(
    func: Callable[[Any], Any], argument: Any, caught: type[BaseException] = Exception
) -> Any:
    """What `func` returns, or the error that it raises."""
    try:
        return func(argument)
    except caught as error:
        return error


def _last_error(stage: Stage) -> BaseException | None:
    return stage.held[-1][1] if stage.held else None


def _nothing_succeeds(stage: Stage) -> str:
    return (
        f"step {stage.name!r}: nothing succeeds any more; {len(stage.held):,} rows failed, the "
        f"last one with {describe(stage.held[-1][1])[0]}"
    )


def _letter(phase: str, text: str, lines: str) -> str:
    return orjson.dumps({"phase": phase, "error": text, "traceback": lines}).decode()
