"""Books of a soak: every call with its end, and a verdict on each end that is not explained."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import batched
from batched.errors import QueueFull, QueueTimeout
from soak.faults import FULL, LATE, Faults

SPACING = 1000
"""Distance between the first items of two calls: more than the items of any call."""

VERDICTS = ("lost", "duplicated", "wrong", "hung")
"""Kinds of broken promises: an accepted call without an end, with two ends, with an end for which
there is no reason, or with a caller that still waits.
"""


@dataclass(eq=False)
class Call:
    """One call, whose items are consecutive numbers. All its other values follow from them."""

    number: int
    size: int
    tag: Any
    listed: bool
    turns: int  # times that the batcher had been closed or opened before the call
    began: float  # (s)
    length: int = 0  # length of its rows, if the items are rows of features

    @property
    def items(self) -> range:
        first = self.number * SPACING
        return range(first, first + self.size)

    def __str__(self) -> str:
        return f"call {self.number} of {self.size} items with tag {self.tag!r}"


@dataclass
class Report:
    """Outcome of one episode, or the sum over many."""

    outcomes: Counter[str] = field(default_factory=Counter)  # calls by kind of end
    faults: Counter[str] = field(default_factory=Counter)  # injected faults by kind
    verdicts: Counter[str] = field(default_factory=Counter)  # verdicts by kind
    accepted: int = 0  # calls
    details: list[str] = field(default_factory=list)  # one for each verdict

    def add(self, other: Report) -> None:
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.verdicts += other.verdicts
        self.accepted += other.accepted
        self.details += other.details

    def blame(self, verdict: str, detail: str) -> None:
        self.verdicts[verdict] += 1
        if len(self.details) < 20:
            self.details.append(f"{verdict}: {detail}")


class Books:
    """Books of one episode.

    There are no locks: threads append, pop and count by atomic operations of the interpreter only.
    """

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.turns = 0  # odd while the batcher is closed, or being closed or opened
        self.cancels = False  # whether a shutdown has cancelled waiting calls
        self.runs_apart = False  # an item may run once more if its output cannot be split
        self.exact = True  # whether the statistics must agree with these books exactly
        self.queue_timeout = math.inf  # time after which waiting calls may expire (s)
        self.refuses = False  # whether a full queue refuses calls
        self.open: dict[int, Call] = {}  # calls without an end, by number
        self.outcomes: list[str] = []  # one for each call that ended
        self.observed: list[int] | None = None  # items in each batch that the observer got
        # items of calls that have ended uncomputed, as the library reported
        self.gone: list[int] = []
        self.blamed: list[tuple[str, str]] = []  # verdict and detail
        self._numbers = itertools.count(1)

    @property
    def most_again(self) -> int:
        """Most repeated runs of items, which the statistics do not count."""
        apart = len(set(self.faults.ran)) if self.runs_apart else 0
        return len(self.faults.again) + apart

    def begin(self, size: int = 1, *, tag: Any = 0, listed: bool = False, length: int = 0) -> Call:
        call = Call(next(self._numbers), size, tag, listed, self.turns, time.perf_counter(), length)
        self.open[call.number] = call
        return call

    def blame(self, verdict: str, detail: str) -> None:
        self.blamed.append((verdict, detail))

    def end(self, call: Call, outcome: str) -> None:
        if self.open.pop(call.number, None) is None:
            self.blame("duplicated", f"{call} ended once more: {outcome}")
        else:
            self.outcomes.append(outcome)

    def answered(self, call: Call, right: bool, answer: object) -> None:
        """Enter that `call` got `answer`."""
        if not right:
            self.blame("wrong", f"{call} got {answer!r:.200}")
        elif not self.faults.struck.keys().isdisjoint(call.items):
            self.blame("wrong", f"{call} was answered in spite of a fault in its batch")
        self.end(call, "answered")

    def failed(self, call: Call, error: BaseException) -> None:
        """Enter that `call` got `error`."""
        if self.faults.expected(call.items, error):
            self.end(call, "failed")
        elif isinstance(error, batched.BatcherClosed):
            if not self.turns % 2 and self.turns == call.turns:
                self.blame(
                    "wrong",
                    f"{call} ended with {error!r}, but the batcher was open",
                )
            self.end(call, "closed")
        elif self.faults.refused(call.items, error):
            self.end(call, "refused")
        elif self._by_queue(call, error):
            self.gone += call.items
            self.end(call, FULL if isinstance(error, QueueFull) else LATE)
        else:
            self.blame(
                "wrong",
                f"{call} got {error!r:.200} caused by {error.__cause__!r:.100}, and no batch of "
                "the call has this error",
            )
            self.end(call, "failed")

    def _by_queue(self, call: Call, error: BaseException) -> bool:
        """Return whether the limits of the queue explain `error`."""
        if isinstance(error, QueueFull):
            self.faults.injected.append(FULL)
            return self.refuses
        if isinstance(error, QueueTimeout):
            self.faults.injected.append(LATE)
            return time.perf_counter() - call.began >= self.queue_timeout
        return False

    def cancelled(self, call: Call) -> None:
        """Enter that the future of `call` was cancelled while the call waited."""
        if call.size == 1 or not self.cancels:  # a shutdown may have cancelled a part
            self.gone += call.items
        self.end(call, "cancelled")

    def cancelled_by_shutdown(self, call: Call) -> None:
        """Enter that `call` ended as cancelled, though its caller did not cancel it."""
        if not self.cancels or (not self.turns % 2 and self.turns == call.turns):
            self.blame("wrong", f"{call} was cancelled without a reason")
        if call.size == 1:
            self.gone += call.items
        self.end(call, "cancelled at shutdown")

    def abandoned(self, call: Call) -> None:
        """Enter that the caller of `call` has stopped waiting. The call may have run or not."""
        refused = any(item in self.faults.refusals for item in call.items)
        self.end(call, "refused" if refused else "abandoned")

    def close(self, stats: batched.Stats | None, hung: Sequence[Call]) -> Report:
        """Return the report after the last call. `hung` are the calls with a waiting caller."""
        for call in hung:
            self.open.pop(call.number, None)
            self.blame("hung", str(call))
        for call in self.open.values():
            self.blame("lost", str(call))
        self._check_runs()
        outcomes = Counter(self.outcomes)
        if stats is not None and not hung and not self.open:
            self._check_stats(stats, outcomes)
        report = Report(outcomes, Counter(self.faults.injected))
        report.accepted = (
            sum(outcomes.values()) - outcomes["refused"] if stats is None else stats.calls
        )
        for verdict, detail in self.blamed:
            report.blame(verdict, detail)
        return report

    def _check_runs(self) -> None:
        runs = Counter(self.faults.ran)
        may_run = Counter(dict.fromkeys(runs, 1 + self.runs_apart))
        more = runs - may_run - Counter(self.faults.again)
        if more:
            self.blame("duplicated", f"items computed too often: {dict(more)!r:.200}")
        computed = [item for item in self.gone if item in runs]
        if computed:
            self.blame(
                "wrong",
                f"items computed after their cancellation in the queue: {computed!r:.200}",
            )

    def _check_stats(self, stats: batched.Stats, ended: Counter[str]) -> None:
        begun = sum(ended.values()) - ended["refused"]
        unknown = ended["abandoned"]
        overdue = ended[FULL] + ended[LATE]
        unanswered = ended["cancelled"] + ended["cancelled at shutdown"] + ended["closed"] + overdue
        good = stats.calls - stats.errors - stats.cancelled - stats.timed_out
        wanted = {
            "queue_size": (stats.queue_size, 0, 0),
            "in_flight": (stats.in_flight, 0, 0),
            "blocked": (stats.blocked, 0, 0),
        }
        if self.exact:
            wanted["calls and rejected"] = stats.calls + stats.rejected, begun, begun
            wanted["errors"] = stats.errors, ended["failed"], ended["failed"] + unknown
            wanted["timed_out"] = stats.timed_out, ended[LATE], ended[LATE] + unknown
            wanted["answered"] = good, ended["answered"], ended["answered"] + unknown
            wanted["unanswered"] = begun - good - stats.errors, unanswered, unanswered + unknown
            ran = len(self.faults.ran)
            wanted["items"] = stats.total_processed, ran - self.most_again, ran
            if self.observed is not None:
                wanted["batches observed"] = (
                    len(self.observed),
                    stats.total_batches,
                    stats.total_batches,
                )
                wanted["items observed"] = (
                    sum(self.observed),
                    stats.total_processed,
                    stats.total_processed,
                )
        for name, (found, least, most) in wanted.items():
            if not least <= found <= most:
                self.blame(
                    "wrong",
                    f"statistics: {name} {found}, by the books {least} to {most}; "
                    f"{dict(ended)}; {stats!r}",
                )
