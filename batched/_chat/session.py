"""Services and their clients: the requests of one process.

1. A service is an address and a key. All its clients share its limits, and the strictest setting of
   any client applies. A session is one client of a service.
2. Items are sent in the order of their arrival; a refused one after requests of others, if there
   are others, which show whether the refusal means it alone. The first item that waits is joined by
   later items of its client, as many as one request may have. One timer is set: for the next moment
   at which a request may be sent, or an item must fail.
3. A refusal costs no attempt, unless it means this request alone. A failure while the breaker is
   open costs none either, unless the item may be its cause: HTTP 500, or a time limit. If the
   service has never answered, every failure costs one, and failures one after another cost all
   items one that wait.
4. `max_wait_s` bounds the wait of a refused item, from its first refusal. While the service answers
   no request at all, `max_wait_s` bounds the wait of every item. That wait is counted from the
   arrival of the item or from the first fault, whichever is later.
5. Every other failure, and every unusable answer, costs one attempt. The next attempt follows after
   a pause of these items alone. JSON that does not fit is sent back once, with its error.
6. If a request of several items fails for good, or exceeds the time limit, half of its items are
   sent alone. If this half fails, it is halved again, and the other half may join any other items.
   If this half succeeds, the other half is halved.
7. An item that is given up leaves the queue. A request without a caller is cancelled.
8. A request whose cost the service does not tell counts with its estimate: also if its answer was
   late, cut off, or not waited for. Refused and failed requests are free.
9. The thread of the loop alone changes this state. Connections are closed once no request has run
   for `IDLE`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any, Final
from weakref import WeakSet

import openai

from .._services.errors import is_service_error, retry_after
from ..errors import EndpointError
from .answers import Tokens, Unusable, message_of, read_answer
from .items import Item, Part, Reply, Request
from .limits import Limits
from .runtime import clients_loop

TOO_MANY: Final = 429
REFUSALS: Final = (TOO_MANY, 503)
"""HTTP statuses that mean "not now": too many requests, service unavailable."""
OWN_FAULT: Final = 500
"""HTTP status of a service that is up and fails on the prompt. Most other statuses from 501 on come
from a proxy in front of a service that is down.
"""
OF_ALL: Final = (401, 403, 404)
"""HTTP statuses that no single item of a request is the cause of."""
AGAIN: Final = (409, 425)
"""HTTP statuses of a request that collides with another one, or comes too early."""
TOO_LARGE: Final = (413, 422)
"""HTTP statuses of a request with too many items."""
NO_CREDIT: Final = "insufficient_quota"
"""Code, or type, of a 429 that no wait resolves."""
CORRECTION: Final = (
    "The JSON does not fit: {}. Answer with the corrected JSON, and with nothing else."
)
"""Message to the model after JSON that does not fit."""
CONNECT: Final = 4.0
"""Longest time until a connection stands (s)."""
NO_CONNECTION: Final = ("ConnectError", "ConnectTimeout")
"""Errors of the HTTP client after which nothing was sent."""
TELL: Final = 5.0
"""Time without an answer after which a warning says why calls wait (s)."""
FIRST_BACKOFF: Final = 0.5
"""Longest pause before the second attempt (s). The bound doubles with each attempt."""
MOST_BACKOFF: Final = 30.0
"""Longest pause between attempts (s)."""
USUAL_ANSWER: Final = 256
"""Expected length of an answer before the first one (tokens)."""
WEIGHT: Final = 0.05
"""Weight of a new answer in the expected length."""
IDLE: Final = 5.0
"""Time after which an unused client closes its connections (s). httpx would not use them again."""
GATHER: Final = 0.005
"""Longest time for which a request waits for further items (s)."""
MILLION: Final = 1_000_000
"""Tokens to which prices apply."""


logger = logging.getLogger("batched")


@dataclass
class Counts:
    """Counts of requests and tokens so far, changed by the thread of the loop only."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Session:
    """One client of a service, as a batch function. `kind` makes its requests and reads answers."""

    def __init__(self, name: str, settings: Any, kind: Any) -> None:
        self.__name__ = self.__qualname__ = self.name = name  # of the client
        self.settings = settings
        self.kind = kind
        self.counts = Counts()
        self.spent = 0.0  # cost of all requests so far
        self.largest = 0  # most items of a request that was answered
        self._usual_answer = float(USUAL_ANSWER)  # tokens
        self._services: dict[int, Service] = {}  # by process: the child of a fork has its own

    @property
    def service(self) -> Service:
        """The service in this process."""
        if (found := self._services.get(os.getpid())) is None:
            # a local server accepts any key, and the official client requires one
            key: Any = self.settings.api_key or os.environ.get("OPENAI_API_KEY") or "none"
            address = os.getpid(), self.settings.base_url.rstrip("/"), key
            found = _services.setdefault(address, Service(*address[1:]))
            found.join(self)
            self._services[os.getpid()] = found
        return found

    def __call__(self, items: list[Item]) -> list[Any]:
        """Return the result, or the exception, for each item, and block the thread until then."""
        return asyncio.run_coroutine_threadsafe(self.on_loop(items), clients_loop()).result()

    async def on_loop(self, items: list[Item]) -> list[Any]:
        """Return the result, or the exception, for each item."""
        for item in items:
            item.future = asyncio.get_running_loop().create_future()
            item.session = self
            if item.given_up:
                item.future.cancel()
        service = self.service
        service.queue(items)
        try:
            return await asyncio.gather(*(item.future for item in items), return_exceptions=True)
        finally:
            for item in items:
                item.give_up()
                service.drop(item)

    def tokens(self, items: list[Item]) -> tuple[int, int]:
        """Estimate the tokens of a request, and of its answer."""
        usual = int(self._usual_answer)
        answer = [usual if item.most_tokens is None else item.most_tokens for item in items]
        return sum(item.tokens for item in items), sum(answer)

    def cost(self, prompt: float, answer: float) -> float:
        """Return the cost of tokens; 0 without prices."""
        prices = self.kind.prices or (0.0, 0.0)
        return float(prices[0] * prompt + prices[1] * answer) / MILLION

    def error(self, reply: Reply, requests: int = 0) -> EndpointError:
        """Return the error for callers."""
        tried = f" ({requests} requests)" if requests > 1 else ""
        request = f" [request {reply.request_id}]" if reply.request_id else ""
        error = EndpointError(f"{self.name}: {reply.why}{tried}{request}")
        error.request_id, error.status_code = reply.request_id, reply.status
        error.is_service = reply.is_fault
        return error

    async def send(self, http: Any, items: list[Item]) -> Reply:
        """Send one request, and read its answer."""
        self.counts.requests += 1
        self.counts.retries += any(item.requests for item in items)
        keys = "".join(item.key + "+" * item.corrected for item in items)
        key = keys if len(items) == 1 else hashlib.sha256(keys.encode()).hexdigest()
        for item in items:
            item.requests += 1
        # a limit for the whole answer, even if it arrives byte by byte
        limit = asyncio.timeout(self.settings.timeout_s)
        try:
            async with limit:
                raw = await self.kind.send(http, items, {"Idempotency-Key": key})
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                return _failure(error)
            why = f"no whole answer came within {self.settings.timeout_s:g} s (timeout_s)"
            return Reply("time limit", error=error, why=why, again=True)
        reply = Reply("rejection", request_id=raw.headers.get("x-request-id"))
        try:
            answer = read_answer(raw.http_response.content)
            if isinstance(usage := answer.usage, Tokens):
                written = usage.completion_tokens
                self.counts.prompt_tokens += usage.prompt_tokens
                if written is None:  # of embeddings, whose estimate is 0
                    written = self.tokens(items)[1]
                else:
                    self.counts.completion_tokens += written
                    self._usual_answer += WEIGHT * (written - self._usual_answer)
                reply.tokens = usage.prompt_tokens + written
                reply.cost = self.cost(usage.prompt_tokens, written)
            reply.results = self.kind.read(answer, items, reply.request_id)
            reply.outcome = "answer"
        except Unusable as error:
            reply.error, reply.why, reply.again = error, str(error), error.again
            reply.text = error.text
        return reply


class Service:
    """One service: its connections, its limits, and the items that wait for them."""

    def __init__(self, base_url: str, key: Any) -> None:
        self.limits = Limits(random=random.random)
        self._address = base_url, key
        self._sessions: WeakSet[Session] = WeakSet()
        self._joining = threading.Lock()  # held while a session joins
        self._http: Any = None  # its connections; None: there are none
        self._idle: asyncio.TimerHandle | None = None  # closes the connections
        self._waiting: dict[Item, None] = {}  # in the order of their turns
        self._running: set[Request] = set()
        # failures before the first answer, of requests that were sent one after another
        self._rounds, self._round_ended = 0, -inf
        self._timer: asyncio.TimerHandle | None = None  # admits waiting items
        self._last_fault = Reply("failure")
        self._telling: asyncio.TimerHandle | None = None  # warns of a wait; None: no fault yet

    def join(self, session: Session) -> None:
        """Apply the strictest limits of all sessions."""
        with self._joining:
            self._sessions.add(session)
            bounds: list[Any] = []
            for name in ("max_workers", "requests_per_minute", "tokens_per_minute"):
                stated = [getattr(each.settings, name) for each in self._sessions]
                bounds.append(min(filter(None, stated), default=None))
            self.limits.allow(*bounds)

    # items that wait

    def queue(self, items: Iterable[Item]) -> None:
        """Let items wait for their turn."""
        now = perf_counter()
        for item in items:
            if item.is_open:
                self._waiting[item] = None
                if not item.requests:
                    item.round = self._rounds
                item.since = item.since if item.refused else now
        self._admit()

    def drop(self, item: Item) -> None:
        """Remove an item without a caller, and cancel its request if no caller is left."""
        self._waiting.pop(item, None)
        if item.request is not None and not any(each.is_open for each in item.request.items):
            item.request.task.cancel()
        self._release(item)

    def _release(self, item: Item) -> None:
        """Let the other half of a request join any items once the half of `item` has ended."""
        part = item.part
        if part is None or any(each.is_open for each in part.items):
            return
        rest, part.rest = part.rest, []
        for item in rest:
            item.part = None
        if rest:
            self.queue(rest)

    def _pack(self, first: Item) -> tuple[list[Item], bool]:
        """Return the items of the next request, from `first` on, and whether no more may join."""
        if first.part is not None:
            return [item for item in first.part.items if item in self._waiting], True
        items: list[Item] = []
        kind, tokens, is_full = first.session.kind, 0, False
        for item in self._waiting if kind.most_items > 1 else (first,):
            if item.part is not None or item.session is not first.session:
                continue
            if item.refused is not first.refused:
                continue
            if items and tokens + item.tokens > kind.most_tokens:
                is_full = True
                continue
            items.append(item)
            tokens += item.tokens
            if len(items) == kind.most_items:
                return items, True
        return items, is_full

    def _admit(self) -> None:
        """Send the requests whose turn has come, and set the timer for the next one."""
        limits = self.limits
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, when = perf_counter(), inf
        if not limits.has_answered:
            for item in [*self._waiting]:
                failed = self._rounds - item.round
                if failed >= item.session.settings.attempts:
                    self._fail([item], self._last_fault, failed)
        poor: set[Session] = set()  # sessions that wait for the cost of running requests
        while first := next(filter(partial(self._has_turn, poor), self._waiting), None):
            session: Session = first.session
            items, is_full = self._pack(first)
            prompt, answer = session.tokens(items)
            when = limits.ready_at(now, prompt + answer)
            if not is_full:
                when = max(when, first.since + GATHER)
            if when > now:
                break
            cost, most = session.cost(prompt, answer), session.settings.max_cost
            running = [each.cost for each in self._running if each.items[0].session is session]
            if most is not None and session.spent + sum(running) + cost > most:
                if running:
                    poor.add(session)
                else:
                    why = f"the next request may exceed max_cost={most:g}, of which "
                    self._fail(items, Reply("nothing", why=f"{why}{session.spent:.4g} is spent"))
                continue
            request = Request(items, limits.begin(now, prompt + answer), cost)
            for item in items:
                del self._waiting[item]
                item.request, item.last, item.sent = request, item.sent, now
            if self._http is None:
                self._http = _http_client(*self._address)
            self._running.add(request)
            request.task = asyncio.create_task(session.send(self._http, items))
            request.task.add_done_callback(partial(self._end, request))
        else:
            when = inf
        if limits.silent_since is not None:
            when = min(when, self._give_up(now, limits.silent_since))
        if self._waiting and when < inf:
            self._timer = clients_loop().call_later(max(0.0, when - now), self._admit)

    def _has_turn(self, poor: set[Session], item: Item) -> bool:
        """Return whether no other item goes first: a refused one waits for requests of others."""
        if item.session in poor:
            return False
        if not item.refused or self.limits.may_tell(item.sent):
            return True
        running = (each for request in self._running for each in request.items)
        return all(each.refused for each in chain(self._waiting, running))

    def _give_up(self, now: float, silent_since: float) -> float:
        """Fail the items that have waited too long for a silent service.

        Return the moment at which the next item will have waited too long.
        """
        first, held = inf, self.limits.held_until
        for item in list(self._waiting):
            most = item.session.settings.max_wait_s
            deadline = max(item.since, silent_since) + most
            if now < deadline and held <= deadline:
                first = min(first, deadline)
                continue
            how = (
                f"no request may be sent for {held - now:.0f} s"
                if held > deadline
                else f"the service has answered nothing for {now - silent_since:.0f} s"
            )
            why = f"{how} (max_wait_s={most:g}); {self._last_fault.why}"
            reply = replace(self._last_fault, outcome="failure", why=why)
            self._fail([item], reply, item.requests)
        return first

    def _fail(self, items: list[Item], reply: Reply, requests: int = 0) -> None:
        """End items with the error of a reply."""
        for item in items:
            self._waiting.pop(item, None)
            if item.is_open:
                error = reply.error
                if reply.outcome != "nothing" or error is None:
                    error = item.session.error(reply, requests)
                    error.__cause__ = reply.error
                item.future.set_exception(error)
            self._release(item)

    # requests

    def _end(self, request: Request, task: asyncio.Task[Reply]) -> None:
        """Note the end of a request: its items have results, are sent again, or fail."""
        if task.cancelled() or task.exception() is not None:
            reply = Reply("nothing", error=None if task.cancelled() else task.exception())
        else:
            reply = task.result()
        items, session = request.items, request.items[0].session
        self._running.discard(request)
        session.spent += request.cost if reply.cost is None else reply.cost
        now = perf_counter()
        if reply.outcome == "refusal" and all(self.limits.is_own(item.last) for item in items):
            reply.outcome = "rejection"
        self.limits.end(request.permit, now, reply.outcome, asked=reply.pause, tokens=reply.tokens)
        if reply.is_fault:
            self._last_fault = reply
            is_silent = reply.outcome == "failure" and reply.status is None
            if is_silent and request.permit.sent > self._round_ended:
                self._rounds, self._round_ended = self._rounds + 1, now
            if self._telling is None:
                self._telling = clients_loop().call_later(TELL, self._tell, session)
        elif reply.outcome != "nothing" and self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._idle is not None:
            self._idle.cancel()
        self._idle = clients_loop().call_later(IDLE, self._disconnect)
        for item in items:
            item.request = None
        if reply.outcome != "answer":
            self._repeat(items, reply, now)
        else:
            session.largest = max(session.largest, len(items))
            for item, result in zip(items, reply.results, strict=True):
                if item.is_open:
                    item.future.set_result(result)
            if (part := items[0].part) is not None and part.rest:
                rest, part.rest = part.rest, []
                self._narrow(rest)
        self._admit()

    def _tell(self, session: Session) -> None:
        """Warn that calls wait for a service."""
        limits, now = self.limits, perf_counter()
        if not self._waiting and not limits.in_flight:
            self._telling = None
            return
        until = max(limits.held_until, limits.open_until or 0.0) - now
        logger.warning(
            "%s: calls wait, because %s; the next request is sent in %.0f s, and a call waits for "
            "at most %g s (max_wait_s)",
            session.name,
            self._last_fault.why,
            max(0.0, until),
            session.settings.max_wait_s,
        )

    def _repeat(self, items: list[Item], reply: Reply, now: float) -> None:
        """Send items of a failed request again, or fail them."""
        session, part = items[0].session, items[0].part
        items = [item for item in items if item.is_open]
        if not items:  # all were given up
            return
        is_free = reply.outcome == "refusal" or (
            reply.outcome == "failure"
            and self.limits.has_answered
            and reply.status != OWN_FAULT
            and self.limits.open_until is not None
        )
        late = []
        for item in items:
            if not is_free:
                item.attempts += 1
            elif not item.refused:
                item.refused, item.since = True, now
            elif now - item.since >= session.settings.max_wait_s:
                late.append(item)
        attempts = max(item.attempts for item in items)
        is_last = not reply.again or (not is_free and attempts >= session.settings.attempts)
        has_culprit = is_last or reply.outcome == "time limit"
        if reply.status == TOO_MANY:  # not of all for lack of credit
            is_late = now - items[0].since >= session.settings.max_wait_s / 2
            has_culprit = reply.again and (is_last or (items[0].refused and is_late))
        if has_culprit and len(items) > 1 and reply.status not in OF_ALL:
            if reply.status in TOO_LARGE and 0 < session.largest < len(items):
                session.kind.most_items = session.largest
            rest = [] if part is None else part.rest
            self._narrow(items)
            self.queue(rest)
            return
        requests = max(item.requests for item in items)
        if is_last:
            self._fail(items, reply, requests)
            return
        if reply.text is not None and not items[0].corrected:
            for item in items:
                wrong = {"role": "assistant", "content": reply.text}
                right = {"role": "user", "content": CORRECTION.format(reply.why)}
                item.content, item.corrected = [*item.content, wrong, right], True
        self._fail(late, reply, requests)
        if is_free:
            self.queue(items)
        else:
            longest = min(MOST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempts - 1, 60))
            clients_loop().call_later(longest * (1 + random.random()) / 2, self.queue, items)

    def _narrow(self, items: list[Item]) -> None:
        """Send half of the items alone; the other half waits for the outcome."""
        half = (len(items) + 1) // 2
        part = Part(items[:half], items[half:])
        for item in items:
            item.attempts, item.part = 0, part if item in part.items else None
        self.queue(part.items)

    def _disconnect(self) -> None:
        """Close the connections, unless a request runs, whose end starts the timer anew."""
        if self._http is not None and not self.limits.in_flight:
            self._closing = clients_loop().create_task(self._http.close())
            self._http = None


def _failure(error: Exception) -> Reply:
    """Classify an exception of the HTTP client."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int):
        if not is_service_error(error):
            return Reply("nothing", error=error, cost=0.0)
        cause = error.__cause__
        is_sent = type(cause).__name__ not in NO_CONNECTION
        detail = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
        why = f"no answer came: {error}{detail}"
        return Reply("failure", error=error, why=why, again=True, cost=None if is_sent else 0.0)
    reply = Reply(
        "rejection",
        error=error,
        why=f"the service answered {status}: "
        f"{message_of(getattr(error, 'body', None) or str(error))}",
        request_id=getattr(error, "request_id", None),
        status=status,
        pause=retry_after(error),
        again=status in AGAIN,
        cost=0.0,
    )
    if status in REFUSALS:
        names = [getattr(error, name, None) for name in ("code", "type")]
        reply.outcome, reply.again = "refusal", NO_CREDIT not in names
        reply.tokens = 0
    elif is_service_error(error):
        reply.outcome, reply.again = "failure", True
    return reply


_services: dict[tuple[int, str, Any], Service] = {}
"""Services by process, address and key."""


def _http_client(base_url: str, key: Any) -> Any:
    """Return the official client, without retries and limits of its own."""
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)()
    timeout = openai.Timeout(None, connect=CONNECT)
    given: Any = partial(asyncio.to_thread, key) if callable(key) else key
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key=given,
        max_retries=0,
        timeout=timeout,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=timeout),
    )
