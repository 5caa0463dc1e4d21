"""Limits of the requests to one service: at once, in each minute, and pauses for all requests.

The module is pure: it never waits, and the present moment is an argument. Rules:

1. At most `limit` requests run at once. A refusal or a time limit lowers the limit by the factor
   `DECREASE`, once for all requests that run at that moment. Every `limit` answers raise it by one,
   up to `most`.
2. A refusal (HTTP 429, 503) holds all requests until the moment that the service names. If the
   service names none, the pause doubles with each refusal, until a request is answered. A failure
   that names a moment holds all requests, too.
3. `MOST_FAILURES` failures in a row open the circuit breaker: no connection, HTTP 5xx, a time
   limit. After a pause, one request is sent as a probe. If the probe fails, the pause doubles,
   unless the service has never answered. Any answer to any request closes the breaker.
4. Requests of a stated rate are spaced evenly over the minute, because a service may allow no
   burst.
5. A rate that is not stated is learned. A service that refuses a request, although it has borne as
   many requests at once before, counts requests in time. Then requests are spaced by the time that
   an answer takes between two refusals, the pauses that the service names left out. Every
   `ANSWERS_PER_STEP` answers narrow the spacing, by steps that grow if nothing is refused. Time
   without requests ends what is learned.
6. A refusal is a request's own if, of the requests sent after its last attempt, at least `OTHERS`
   have ended, and at most one in `OTHERS` was refused. Then it holds no other request.
7. No 60 seconds have more tokens than the budget. The tokens of a request are estimated, and
   corrected by its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

DECREASE: Final = 0.9
"""Factor of the limit after a refusal, as in Netflix's concurrency-limits.

A smaller factor leaves a tenth of the service's capacity unused, because a round of answers raises
the limit by one only.
"""
FIRST_PAUSE: Final = 0.2
"""First pause of the breaker, and after a refusal that names no moment (s)."""
MOST_PAUSE: Final = 16.0
"""Longest pause of the breaker, and after refusals that name no moment (s)."""
STEADY_PAUSES: Final = 10
"""Pauses of the length that a service names, for which the limit is not raised after it."""
MOST_STEADY: Final = 60.0
"""Longest time for which the limit is not raised (s)."""
MOST_FAILURES: Final = 5
"""Failures in a row that open the breaker."""
SPREAD: Final = 0.05
"""Largest share by which a pause is extended at random, so that several clients do not resume at
the same moment.
"""
RATES: Final = 8
"""Rates that are remembered; the highest of them counts. If refusals come at random, each rate is
lower than the one before it, and few of them lead to a spacing that is too wide.
"""
ANSWERS_PER_RATE: Final = 16
"""Answers between two refusals that make a rate."""
ANSWERS_PER_STEP: Final = 20
"""Answers without a refusal that narrow the spacing."""
WIDER: Final = 1.25
"""Largest factor of the spacing after a refusal that comes earlier."""
FIRST: Final = 0.25
"""First spacing, as a share of that of the first rate, which is low: much was refused."""
MARGIN: Final = 0.04
"""Share by which the spacing is wider than the rate asks for. Service and network vary."""
STEP: Final = 0.01
"""Share by which the spacing is narrowed."""
EVEN_STEPS: Final = 3
"""Steps of that size; each later one is four times as large as the one before it."""
MOST_STEP: Final = 0.5
"""Largest step."""
MOST_SPACING: Final = 1.0
"""Largest learned spacing (s). Pauses alone serve a slower service well."""
QUIET: Final = 0.1
"""Time without requests that shows that the service could bear more of them (s)."""
FORGET: Final = 10.0
"""Time without requests after which the spacing is forgotten, because a service may allow a burst
again (s).
"""
OTHERS: Final = 20
"""Later requests that show that a refusal means one request alone."""
LATEST: Final = 100
"""Latest requests that are looked at for this."""
WINDOW: Final = 61.0
"""Time in which the requests, or tokens, of a minute are sent (s): a minute, and one second for a
request that takes longer to the service than the next one.
"""

Outcome = Literal["answer", "rejection", "refusal", "failure", "time limit", "nothing"]
"""End of a request, in this order: answered; answered with an error of the request itself; refused
for now; failed by the service; not answered in time; not sent.
"""


@dataclass(eq=False, slots=True)
class Expense:
    """Part of a budget that one request takes."""

    moment: float
    amount: int
    """Estimated amount; the true one, once it is known."""


class Budget:
    """Tokens that may be spent in any 60 seconds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._expenses: deque[Expense] = deque()  # of the last `WINDOW`

    def ready_at(self, now: float, amount: int) -> float:
        """Return the first moment at which `amount` may be spent.

        An amount above the whole budget may be spent once the budget is unused.
        """
        while self._expenses and self._expenses[0].moment <= now - WINDOW:
            self._expenses.popleft()
        excess = sum([expense.amount for expense in self._expenses]) + amount - self.most
        when = now
        for expense in self._expenses:
            if excess <= 0:
                break
            excess -= expense.amount
            when = expense.moment + WINDOW
        return when

    def spend(self, now: float, amount: int) -> Expense:
        """Spend an amount, and return the expense."""
        expense = Expense(now, amount)
        self._expenses.append(expense)
        return expense


@dataclass(eq=False, slots=True)
class Permit:
    """One running request."""

    sent: float
    """Moment at which it was sent (s)."""
    probe: bool
    tokens: Expense | None
    running: int
    """Requests that ran then, this one included."""


class Limits:
    """Limits of the requests to one service."""

    def __init__(self, *, random: Callable[[], float]) -> None:
        """Make limits of one request at once, until `allow` is called; `random` returns 0 to 1."""
        self.most = self.limit = 1  # requests at once
        self.in_flight = 0
        self.held_until = -inf  # end of the pause after a refusal (s)
        self.open_until: float | None = None  # moment of the next probe (s); None: breaker closed
        # moment of the first fault since the last answer, or of an answer within a pause (s);
        # None: no fault
        self.silent_since: float | None = None
        self._random = random
        self._requests_per_minute: int | None = None
        self._next_at = -inf  # moment of the next request by its spacing (s)
        self._tokens: Budget | None = None
        self._probing = False
        self._lowered = -inf  # moment of the last decrease of the limit (s)
        self._steady_until = -inf  # moment before which the limit is not raised (s)
        self._round = 0  # answers since the last change of the limit
        self.has_answered = False  # whether the service has answered any request so far
        # moments of sending of the last requests, and whether they were refused
        self._recent: deque[tuple[float, bool]] = deque(maxlen=LATEST)
        self._refusals = 0  # pauses in a row
        self._failures = 0  # in a row
        self._openings = 0  # pauses of the breaker in a row
        self._ended = -inf  # moment of the last end of a request (s)
        self._borne = 0.0  # requests at once that the service has borne
        self._learn_anew(-inf)

    def _learn_anew(self, now: float) -> None:
        """Forget the learned spacing."""
        self._spacing = 0.0  # least time between requests (s); 0: none is learned
        self._rates: deque[float] = deque(maxlen=RATES)  # answers per second
        self._since = now  # beginning of the present rate (s)
        self._answers = 0  # from then on
        self._calm = 0  # answers since the last refusal
        self._spaced = 0  # of them, to requests that were held up by the spacing alone

    def allow(self, most: int, requests: int | None = None, tokens: int | None = None) -> None:
        """Set the bounds: most requests at once, and requests and tokens in a minute."""
        if most != self.most:
            self.most = self.limit = most
        self._requests_per_minute = requests
        if tokens is None:
            self._tokens = None
        elif self._tokens is None:
            self._tokens = Budget(tokens)
        else:
            self._tokens.most = tokens

    def ready_at(self, now: float, tokens: int) -> float:
        """Return the first moment at which a request of `tokens` may be sent.

        The moment is infinite if another request has to end first.
        """
        if self.in_flight >= self.limit or self._probing:
            return inf
        when = max(now, self.held_until, self._next_at)
        if self.open_until is not None:
            when = max(when, self.open_until)
        if self._tokens is not None:
            when = max(when, self._tokens.ready_at(now, tokens))
        return when

    def begin(self, now: float, tokens: int) -> Permit:
        """Count a request that is sent now, and return its permit."""
        quiet = now - max(self._next_at, self.held_until, self._ended)
        if quiet > (FORGET if self._spacing else QUIET):
            self._learn_anew(now)
        self.in_flight += 1
        self._probing = self.open_until is not None
        stated = self._requests_per_minute
        spacing = max(self._spacing, 0.0 if stated is None else WINDOW / stated)
        self._next_at = max(now, self._next_at) + spacing
        spent = None if self._tokens is None else self._tokens.spend(now, tokens)
        return Permit(now, self._probing, spent, self.in_flight)

    def end(
        self,
        permit: Permit,
        now: float,
        outcome: Outcome,
        *,
        asked: float | None = None,
        tokens: int | None = None,
    ) -> None:
        """Count the end of a request.

        `asked` is the pause that the service names (s). `tokens` are the tokens that the request
        took, None if they are unknown.
        """
        self.in_flight -= 1
        self._ended = now
        if permit.probe:
            self._probing = False
        if tokens is not None and permit.tokens is not None:
            permit.tokens.amount = tokens
        if outcome == "nothing":
            return
        if outcome in ("answer", "rejection", "refusal"):
            self.has_answered = True
            self._recent.append((permit.sent, outcome == "refusal"))
        if outcome in ("refusal", "time limit") and permit.sent > self._lowered:
            self._lower(permit, now, outcome)
        if outcome not in ("answer", "rejection") and self.silent_since is None:
            self.silent_since = now
        if outcome in ("failure", "time limit"):
            self._fail(permit, now)
            if asked:
                self._hold(permit.sent, now, asked)
            return
        self._failures = self._openings = 0
        self.open_until, self._probing = None, False
        if outcome == "refusal":
            self._hold(permit.sent, now, asked)
            return
        self._refusals = 0
        self.silent_since = now if self.held_until > now else None
        if outcome == "answer":
            self._raise(permit, now)

    def is_own(self, sent: float) -> bool:
        """Return whether a refusal means its request alone, whose last attempt was `sent`."""
        later = self._later(sent)
        return len(later) >= OTHERS and sum(later) * OTHERS <= len(later)

    def may_tell(self, sent: float) -> bool:
        """Return whether enough requests that were sent after `sent` have ended for `is_own`.

        A few refusals among them need more answers.
        """
        later = self._later(sent)
        return len(later) >= min(OTHERS * max(1, sum(later)), LATEST)

    def _later(self, sent: float) -> list[bool]:
        return [refused for moment, refused in self._recent if moment > sent]

    def _raise(self, permit: Permit, now: float) -> None:
        """Raise the limit, or narrow the spacing, if an answer is the last of its round."""
        self._borne = max(self._borne, permit.running)
        self._answers += 1
        self._round += 1
        if self._round >= self.limit and now >= self._steady_until:
            self.limit = min(self.most, self.limit + 1)
            self._round = 0
        self._calm += 1
        if self._spacing and permit.running < self.limit:
            self._spaced += 1
            steps, rest = divmod(self._spaced, ANSWERS_PER_STEP)
            if not rest:
                self._spacing /= 1 + min(MOST_STEP, STEP * 4.0 ** max(0, steps - EVEN_STEPS))

    def _lower(self, permit: Permit, now: float, outcome: Outcome) -> None:
        """Lower the limit, or learn the spacing, after the first refusal of requests at once."""
        self._lowered = now
        self._round = 0
        counts_in_time = outcome == "refusal" and permit.running <= max(2, self._borne)
        if counts_in_time and self._answers:
            self._space(now)
        else:
            self.limit = max(1, int(self.limit * DECREASE))
        if outcome == "refusal":
            self._borne *= DECREASE

    def _space(self, now: float) -> None:
        """Learn the spacing after a refusal."""
        time = max(now - self._since, QUIET)
        rate = self._answers / time
        if self._answers >= ANSWERS_PER_RATE and time > QUIET:
            self._rates.append(rate)
            self._since, self._answers = now, 0
        rate = max(self._rates, default=rate)
        was_near = self._calm >= ANSWERS_PER_STEP
        widest = self._spacing * (1 + 2 * STEP if was_near else WIDER) or FIRST / rate
        self._spacing = min(widest, (1 + MARGIN * was_near) / rate, MOST_SPACING)
        self._calm = self._spaced = 0

    def _hold(self, sent: float, now: float, asked: float | None) -> None:
        """Hold all requests for the pause after a refusal."""
        if asked:
            self._steady_until = now + min(STEADY_PAUSES * asked, MOST_STEADY)
            pause = asked * (1 + SPREAD * self._random())
            self._since += max(0.0, now + pause - max(now, self.held_until))
        elif sent > self.held_until:  # the first refusal since the last pause
            self._refusals += 1
            pause = self._backoff(self._refusals, min(self._spacing or FIRST_PAUSE, FIRST_PAUSE))
        else:
            return
        self.held_until = max(self.held_until, now + pause)

    def _fail(self, permit: Permit, now: float) -> None:
        """Count a failure, and open the breaker, or extend its pause, if it is due."""
        self._failures += 1
        is_open = self.open_until is not None
        if permit.probe if is_open else self._failures >= MOST_FAILURES:
            self._openings += self.has_answered or not self._openings
            self.open_until = now + self._backoff(self._openings, FIRST_PAUSE)

    def _backoff(self, number: int, first: float) -> float:
        """Return the length of the pause with that number, from 1 on (s).

        The length is a random share, from one half to all, of a bound that is `first` and doubles.
        """
        longest = min(MOST_PAUSE, first * 2.0 ** min(number - 1, 60))
        return longest * (1 + self._random()) / 2
