"""Books of a soak: every call with its end, and a verdict on each end that is not explained."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import batched
from soak.faults import FULL, LATE, Faults

SPACING = 1000
"""Distance between the first items of two calls: more than the items of any call."""

VERDICTS = ("lost", "duplicated", "wrong", "hung")
"""Kinds of broken promises: an accepted call without an end, with two ends, with an end for which
there is no reason, or with a caller that still waits.
"""


@dataclass(eq=False)
class Call:
    """One call. Its items are consecutive numbers, from which all other values follow."""

    number: int
    size: int
    tag: int
    listed: bool
    length: int  # length of its rows, if the items are rows of features
    turns: int  # times that the batcher had been closed or opened before the call
    began: float  # (s)

    @property
    def items(self) -> range:
        first = self.number * SPACING
        return range(first, first + self.size)

    def __str__(self) -> str:
        return f"call {self.number} of {self.size} items with tag {self.tag}"


@dataclass
class Report:
    """Outcome of one episode, or the sum over many."""

    outcomes: Counter[str] = field(default_factory=Counter)  # calls by kind of end
    faults: Counter[str] = field(default_factory=Counter)  # injected faults by kind
    verdicts: Counter[str] = field(default_factory=Counter)  # verdicts by kind
    details: list[str] = field(default_factory=list)  # one for each verdict

    def blame(self, verdict: str, detail: str) -> None:
        assert verdict in VERDICTS
        self.verdicts[verdict] += 1
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
        self.queue_timeout = math.inf  # time after which waiting calls may expire (s)
        self.refuses = False  # whether a full queue refuses calls
        self.open: dict[int, Call] = {}  # calls without an end, by number
        self.outcomes: list[str] = []  # one for each call that ended
        self.observed: list[int] | None = None  # items in each batch that the observer got
        self.gone: list[int] = []  # items of calls that ended uncomputed, as the library said
        self.report = Report()
        self.blame = self.report.blame
        self._numbers = itertools.count(1)

    @property
    def most_again(self) -> int:
        """Most repeated runs of items, which the statistics do not count."""
        return len(self.faults.again) + self.runs_apart * len(set(self.faults.ran))

    def begin(self, size: int, tag: int, listed: bool, length: int) -> Call:
        moment = time.perf_counter()
        call = Call(next(self._numbers), size, tag, listed, length, self.turns, moment)
        self.open[call.number] = call
        return call

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
        closed = self.turns % 2 or self.turns != call.turns
        late = time.perf_counter() - call.began >= self.queue_timeout
        outcome = "failed"
        if self.faults.explain(call.items, error):
            explained = True
        elif isinstance(error, batched.BatcherClosed):
            outcome, explained = "closed", bool(closed)
        elif self.faults.refused(call.items, error):
            outcome, explained = "refused", True
        elif isinstance(error, batched.QueueFull):
            outcome, explained = FULL, self.refuses
        elif isinstance(error, batched.QueueTimeout):
            outcome, explained = LATE, late
        else:
            explained = False
        if outcome in (FULL, LATE):
            self.faults.injected.append(outcome)
            self.gone += call.items
        if not explained:
            self.blame("wrong", f"{call} got {error!r:.200} caused by {error.__cause__!r:.100}")
        self.end(call, outcome)

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

    def close(self, stats: batched.Stats, hung: Sequence[Call] = ()) -> Report:
        """Return the report after the last call. `hung` are the calls with a waiting caller."""
        lost = [call for call in self.open.values() if call not in hung]
        for verdict, calls in (("hung", hung), ("lost", lost)):
            for call in calls:
                self.blame(verdict, str(call))
        runs = Counter(self.faults.ran)
        more = runs - Counter(dict.fromkeys(runs, 1 + self.runs_apart)) - Counter(self.faults.again)
        if more:
            self.blame("duplicated", f"items computed too often: {dict(more)!r:.200}")
        if computed := [item for item in self.gone if item in runs]:
            self.blame("wrong", f"items computed after they had ended: {computed!r:.200}")
        ended = self.report.outcomes = Counter(self.outcomes)
        self.report.faults = Counter(self.faults.injected)
        if not self.open:
            self._check_stats(stats, ended)
        return self.report

    def _check_stats(self, stats: batched.Stats, ended: Counter[str]) -> None:
        begun = sum(ended.values()) - ended["refused"]
        unknown = ended["abandoned"]
        without = stats.errors + stats.cancelled + stats.timed_out
        batches, items, ran = stats.total_batches, stats.total_processed, len(self.faults.ran)
        observed = [batches, items]
        if self.observed is not None:
            observed = [len(self.observed), sum(self.observed)]
        wanted = {
            "load": (stats.queue_size + stats.in_flight + stats.blocked, 0, 0),
            "calls": (stats.calls + stats.rejected, begun, begun),
            "items": (items, ran - self.most_again, ran),
            "batches observed": (observed[0], batches, batches),
            "items observed": (observed[1], items, items),
        }
        for name, found, outcome in (
            ("errors", stats.errors, "failed"),
            ("timed_out", stats.timed_out, LATE),
            ("answered", stats.calls - without, "answered"),
        ):
            wanted[name] = found, ended[outcome], ended[outcome] + unknown
        for name, (found, least, most) in wanted.items():
            if not least <= found <= most:
                self.blame(
                    "wrong", f"{name} {found}, by the books {least} to {most}; {ended}; {stats!r}"
                )
