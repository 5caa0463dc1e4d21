"""Limits of the requests to one service: how many at once, how many a minute, and when none at all.

Pure: the moment is an argument, and None of this waits. Rules:

1. At most `limit` requests are under way. A round of answers, as many as the limit, raises it by
   one, up to `most`. A refusal, a time limit that passes, and latency that has doubled lower it, by
   `DECREASE`, once for all requests that were under way by then.
2. A refusal (HTTP 429, 503) holds every request until the moment that the service asks for; if it
   names none, for a pause that doubles with each refusal, until something is answered.
3. `MOST_FAILURES` failures in a row (no connection, HTTP 5xx, a time limit that passes) open the
   circuit breaker: no request is sent for a pause; then one is, the probe. Its failure doubles the
   pause. Whatever is answered, to any request, closes the breaker.
4. No 60 seconds have more requests, or tokens, than their budgets. What a request will cost is
   estimated; the answer tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

DECREASE: Final = 0.9
"""Factor of the limit after a refusal, as in Netflix's concurrency-limits; with less, a tenth of
what a service allows is left unused, since each round of answers makes up for only one.
"""
SLOWER: Final = 2.0
"""Mean latency beside the usual one, from which on requests are taken to stand in line there."""
SAMPLES: Final = 32
"""Answers of which the mean latency is taken: that of 16 times as many words is no such sign."""
WEIGHT: Final = 0.2
"""Weight of a new mean in the usual latency."""
FIRST_PAUSE: Final = 0.2
"""First pause after a refusal that names no moment, and of the breaker (s)."""
MOST_PAUSE: Final = 16.0
"""Longest of either (s); so long may calls wait after an outage."""
MOST_FAILURES: Final = 5
"""Failures in a row that open the breaker."""
SPREAD: Final = 0.05
"""Share by which a pause that the service asks for is drawn out at random, so that several clients
do not come back at once.
"""
WINDOW: Final = 61.0
"""Time for which a budget remembers a request (s): a minute, and the time by which one request may
be later on its way than the next.
"""

Outcome = Literal["answer", "rejection", "refusal", "failure", "time limit", "nothing"]
"""End of a request: answered; answered with an error that is its own; refused for now; failed by
the service, at once or by taking too long; not sent at all.
"""


@dataclass(eq=False, slots=True)
class Expense:
    """Part of a budget that a request takes."""

    moment: float
    amount: int
    counted: bool = True


class Budget:
    """Requests, or tokens, that may be spent in any 60 seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._expenses: deque[Expense] = deque()  # of the last `WINDOW`
        self._total = 0  # of these

    def ready_at(self, now: float, amount: int) -> float:
        """First moment at which `amount` fits; of more than the whole budget, that at which nothing
        else is spent.
        """
        while self._expenses and self._expenses[0].moment <= now - WINDOW:
            gone = self._expenses.popleft()
            gone.counted = False
            self._total -= gone.amount
        excess = self._total + amount - self._most
        when = now
        for expense in self._expenses:
            if excess <= 0:
                break
            excess -= expense.amount
            when = expense.moment + WINDOW
        return when

    def spend(self, now: float, amount: int) -> Expense:
        expense = Expense(now, amount)
        self._expenses.append(expense)
        self._total += amount
        return expense

    def correct(self, expense: Expense, amount: int) -> None:
        """Has `expense` come to `amount` in fact."""
        if expense.counted:
            self._total += amount - expense.amount
        expense.amount = amount


@dataclass(eq=False, slots=True)
class Permit:
    """One request under way."""

    sent: float
    probe: bool
    tokens: Expense | None


class Limits:
    """Limits of the requests to one service."""

    def __init__(
        self,
        most: int,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        *,
        random: Callable[[], float],
    ) -> None:
        self.most = most
        self.limit = most  # requests at once, at present
        self.in_flight = 0
        self.held_until = -inf  # by a refusal (s)
        self.open_until: float | None = None  # when the breaker lets a probe pass; None: closed
        # since when the service has answered nothing, after its first fault (s); None: it has
        self.silent_since: float | None = None
        self._random = random  # from 0 to 1
        self._requests = None if requests_per_minute is None else Budget(requests_per_minute)
        self._tokens = None if tokens_per_minute is None else Budget(tokens_per_minute)
        self._probing = False
        self._lowered = -inf  # when the limit was (s)
        self._round = 0  # answers of this round
        self._refusals = 0  # pauses in a row
        self._failures = 0  # in a row
        self._openings = 0  # pauses of the breaker in a row
        self._usual = inf  # latency (s)
        self._samples = 0
        self._seconds = 0.0  # latencies of these

    def ready_at(self, now: float, tokens: int) -> float:
        """First moment at which a request may be sent, as far as can be known; infinite: not
        before another has ended.
        """
        if self.in_flight >= self.limit or self._probing:
            return inf
        when = max(now, self.held_until)
        if self.open_until is not None:
            when = max(when, self.open_until)
        if self._requests is not None:
            when = max(when, self._requests.ready_at(now, 1))
        if self._tokens is not None:
            when = max(when, self._tokens.ready_at(now, tokens))
        return when

    def begin(self, now: float, tokens: int) -> Permit:
        """One more request, which is sent now."""
        self.in_flight += 1
        self._probing = self.open_until is not None
        if self._requests is not None:
            self._requests.spend(now, 1)
        spent = None if self._tokens is None else self._tokens.spend(now, tokens)
        return Permit(now, self._probing, spent)

    def end(
        self,
        permit: Permit,
        now: float,
        outcome: Outcome,
        *,
        asked: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """The request has ended: `asked` is the pause that was asked for (s), `tokens` what it
        took.
        """
        self.in_flight -= 1
        if permit.probe:
            self._probing = False
        if tokens is not None and permit.tokens is not None and self._tokens is not None:
            self._tokens.correct(permit.tokens, tokens)
        if outcome == "nothing":
            return
        if outcome in ("refusal", "time limit"):
            self._lower(permit.sent, now)
        if outcome in ("failure", "time limit"):
            self._fail(permit, now)
            return
        self._failures = self._openings = 0
        self.open_until, self._probing = None, False
        if outcome == "refusal":
            self._hold(permit.sent, now, asked)
            return
        self._refusals = 0
        self.silent_since = None
        if outcome == "answer":
            self._raise(now, now - permit.sent)

    def _hold(self, sent: float, now: float, asked: float | None) -> None:
        if self.silent_since is None:
            self.silent_since = now
        if asked:
            pause = asked * (1 + SPREAD * self._random())
        elif sent > self.held_until:  # else it knew of no pause
            self._refusals += 1
            pause = self._backoff(self._refusals)
        else:
            return
        self.held_until = max(self.held_until, now + pause)

    def _fail(self, permit: Permit, now: float) -> None:
        if self.silent_since is None:
            self.silent_since = now
        self._failures += 1
        is_open = self.open_until is not None
        if permit.probe if is_open else self._failures >= MOST_FAILURES:
            self._openings += 1
            self.open_until = now + self._backoff(self._openings)

    def _backoff(self, number: int) -> float:
        """Length of the pause by that number, from 1 on; from a half to all of it, at random."""
        longest = min(MOST_PAUSE, FIRST_PAUSE * 2.0 ** min(number - 1, 60))
        return longest * (1 + self._random()) / 2

    def _lower(self, sent: float, now: float) -> None:
        if sent > self._lowered:
            self.limit = max(1, int(self.limit * DECREASE))
            self._lowered = now
            self._round = 0

    def _raise(self, now: float, latency: float) -> None:
        self._round += 1
        if self._round >= self.limit:
            self.limit = min(self.most, self.limit + 1)
            self._round = 0
        self._samples += 1
        self._seconds += latency
        if self._samples < SAMPLES:
            return
        mean = self._seconds / self._samples
        self._samples, self._seconds = 0, 0.0
        if mean > SLOWER * self._usual:
            self._lower(now, now)
            self._usual = mean
        elif self._usual == inf:
            self._usual = mean
        else:
            self._usual += WEIGHT * (mean - self._usual)
