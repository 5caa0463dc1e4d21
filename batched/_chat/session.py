"""Services and their clients: the requests of one process.

1. A service is an address and a key. All its clients share its limits, and the strictest rate of
   any client applies. A session is one client of a service.
2. A request has the items of one batch. Requests are sent in the order in which they begin to wait.
   If others wait, or were sent since, a refused request goes after them: their answers show whether
   the refusal means it alone. One that waits for its client's budget lets others pass. One timer is
   set, for the next moment at which a request may be sent or must fail.
3. A refusal costs no attempt, unless it means this request alone. A failure while the breaker is
   open costs none either, unless the request may be its cause: HTTP 500, or a time limit. If the
   service has never answered, every failure costs one, and a failed probe costs every request
   that waits one.
4. `max_wait_s` bounds the wait of a refused request, from its first refusal. While the service
   answers nothing at all, `max_wait_s` bounds the wait of every request. That wait is counted from
   the arrival of the request or from the first fault, whichever is later. An answer within a pause
   begins it anew.
5. Every other failure, and every unusable answer, costs one attempt. The next attempt follows after
   a pause of this request alone. JSON that does not fit is sent back once, with its error.
6. A request of several items may fail for good, exceed the time limit, or be refused for half of
   `max_wait_s`. Then each half of its items becomes a request. If all items have results then, and
   the service called the request too large, no later request is larger than those answered.
7. A request without a caller is cancelled.
8. If the service does not tell the cost of a request, its estimate counts: also if the answer was
   late, cut off, or not waited for. Refused and failed requests are free.
9. The thread of the loop alone changes this state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any, Final
from weakref import WeakSet

import openai

from .._services.errors import is_service_error, retry_after
from ..errors import EndpointError
from .answers import Tokens, Unusable, message_of, read_answer
from .items import Item, Reply, Request
from .limits import Limits
from .questions import CHARACTERS, USUAL_ANSWER
from .runtime import clients_loop

REFUSALS: Final = (429, 503)
"""HTTP statuses that mean "not now": too many requests, service unavailable."""
OWN_FAULT: Final = 500
"""HTTP status of a service that is up and fails on the prompt. Most other statuses from 501 on come
from a proxy in front of a service that is down.
"""
OF_ALL: Final = (401, 403, 404)
"""HTTP statuses that no single item of a request is the cause of."""
WRONG_ADDRESS: Final = (None, 404, 405)
"""HTTP statuses of which the address may be the cause; None: no answer came."""
AGAIN: Final = (409, 425)
"""HTTP statuses of a request that collides with another one, or comes too early."""
TOO_LARGE: Final = (413, 422)
"""HTTP statuses of a request with too many items."""
NO_CREDIT: Final = "insufficient_quota"
"""Code, or type, of a 429 that no wait resolves."""
CORRECTION: Final = (
    "The answer is wrong: {}. Answer with the corrected JSON, and with nothing else."
)
"""Message to the model after JSON that does not fit."""
CONNECT: Final = 4.0
"""Longest time until a connection stands (s)."""
NO_CONNECTION: Final = ("ConnectError", "ConnectTimeout", "ProxyError", "LocalProtocolError")
"""Errors of the HTTP client after which nothing was sent."""
TELL: Final = 5.0
"""Time without an answer after which a warning says why calls wait (s)."""
FIRST_BACKOFF: Final = 0.5
"""Longest pause before the second attempt (s). The bound doubles with each attempt."""
MOST_BACKOFF: Final = 30.0
"""Longest pause between attempts (s)."""
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
        self.longest = USUAL_ANSWER  # tokens of the longest answer so far

    @property
    def service(self) -> Service:
        """The service in this process."""
        # a local server accepts any key, and the official client requires one
        key: Any = self.settings.api_key or os.environ.get("OPENAI_API_KEY") or "none"
        if isinstance(key, str):
            key = key.strip() or "none"  # a file ends with a newline, which no header may have
        address = os.getpid(), self.settings.base_url.rstrip("/"), key
        if (found := _services.get(address)) is None:
            found = _services.setdefault(address, Service(*address[1:]))
        found.join(self)
        return found

    def __call__(self, items: list[Item]) -> list[Any]:
        """Return the result, or the exception, for each item, and block the thread until then."""
        return asyncio.run_coroutine_threadsafe(self.on_loop(items), clients_loop()).result()

    async def on_loop(self, items: list[Item]) -> list[Any]:
        """Return the result, or the exception, for each item."""
        task = asyncio.ensure_future(self._ask(items))
        for item in items:
            item.work = items, task
        found: Any = (await asyncio.gather(task, return_exceptions=True))[0]
        return [found] * len(items) if isinstance(found, BaseException) else found

    async def _ask(self, items: list[Item], whole: Request | None = None) -> list[Any]:
        """Return the result, or the exception, for each item. `whole`: a larger request."""
        kind, service, settings = self.kind, self.service, self.settings
        several = len(items) > 1
        if len(items) > kind.most_items or (several and self.tokens(items)[0] > kind.most_tokens):
            return await self._halve(items, whole)
        request = Request(self, items, 0.0)
        if whole is not None and whole.refused:  # its half waits as it would
            request.since, request.refused, request.sent = whole.since, True, whole.sent
        while True:
            try:
                reply = await service.send(request)
            except EndpointError as error:  # it may not be sent
                return [error] * len(items)
            if reply.outcome == "answer":
                self.largest = max(self.largest, len(items))
                return [*reply.results]
            now, limits = perf_counter(), service.limits
            is_free = reply.outcome == "refusal" or (
                reply.outcome == "failure"
                and limits.has_answered
                and reply.status != OWN_FAULT
                and limits.open_until is not None
            )
            if not is_free:
                request.attempts += 1
            elif not request.refused:
                request.refused, request.since = True, now
            is_late = is_free and now - request.since >= settings.max_wait_s / (1 + several)
            is_last = not reply.again or (not is_free and request.attempts >= settings.attempts)
            # errors of all items: wrong address or key, and no credit
            may_search = reply.status not in OF_ALL and (reply.again or reply.outcome != "refusal")
            if several and may_search and (is_last or is_late or reply.outcome == "time limit"):
                found = await self._halve(items, request)
                has_errors = any(isinstance(each, BaseException) for each in found)
                if reply.status in TOO_LARGE and self.largest < len(items) and not has_errors:
                    kind.most_items = self.largest
                return found
            if is_last or is_late:
                return [self.error(reply, request.sendings) for _ in items]
            if reply.text is not None and not request.corrected:
                wrong = {"role": "assistant", "content": reply.text}
                right = {"role": "user", "content": CORRECTION.format(reply.why)}
                items[0].content = [*items[0].content, wrong, right]
                items[0].tokens += len(f"{wrong}{right}") // CHARACTERS
                request.corrected = True
            if not is_free:
                longest = min(MOST_BACKOFF, FIRST_BACKOFF * 2.0 ** (request.attempts - 1))
                await asyncio.sleep(longest * (1 + random.random()) / 2)

    async def _halve(self, items: list[Item], whole: Request | None) -> list[Any]:
        half = (len(items) + 1) // 2
        parts = [self._ask(part, whole) for part in (items[:half], items[half:])]
        return [*chain.from_iterable(await asyncio.gather(*parts))]

    def tokens(self, items: list[Item], usual: int = USUAL_ANSWER) -> tuple[int, int]:
        """Estimate the tokens of a request, and of its answer; `usual`: of one without a limit."""
        most = [usual if each.most_tokens is None else each.most_tokens for each in items]
        return sum(item.tokens for item in items), sum(most)

    def cost(self, prompt: float, answer: float) -> float:
        """Return the cost of tokens; 0 without prices."""
        prices = self.kind.prices or (0.0, 0.0)
        return float(prices[0] * prompt + prices[1] * answer) / MILLION

    def error(self, reply: Reply, sendings: int) -> BaseException:
        """Return the error for callers."""
        if reply.outcome == "nothing" and reply.error is not None:
            return reply.error
        tried = f" ({sendings} requests)" if sendings > 1 else ""
        request = f" [request {reply.request_id}]" if reply.request_id else ""
        error = EndpointError(f"{self.name}: {reply.why}{tried}{request}")
        error.request_id, error.status_code = reply.request_id, reply.status
        error.is_service, error.__cause__ = reply.is_fault, reply.error
        return error

    async def send(self, http: Any, request: Request) -> Reply:
        """Send a request, and read its answer."""
        items = request.items
        self.counts.requests += 1
        self.counts.retries += request.sendings > 0
        request.sendings += 1
        # a limit for the whole answer, even if it arrives byte by byte
        limit = asyncio.timeout(self.settings.timeout_s)
        try:
            async with limit:
                raw = await self.kind.send(http, items)
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
                if written is None:  # of embeddings: their estimate is 0
                    written = self.tokens(items)[1]
                self.counts.completion_tokens += written
                self.longest = max(self.longest, written)
                reply.tokens = usage.prompt_tokens + written
                reply.cost = self.cost(usage.prompt_tokens, written)
            reply.results = self.kind.read(answer, items, reply.request_id)
            reply.outcome = "answer"
        except Unusable as error:
            reply.error, reply.why, reply.again = error, str(error), error.again
            reply.text = error.text
        return reply


class Service:
    """One service: its connections, its limits, and the requests that wait for them."""

    def __init__(self, base_url: str, key: Any) -> None:
        self.limits = Limits(random=random.random)
        self._address = base_url, key
        self._sessions: WeakSet[Session] = WeakSet()
        self._joining = threading.Lock()  # held while a session joins
        self._joined = 0  # sessions to which the limits were last set
        self._waiting: dict[Request, None] = {}  # in the order of their turns
        self._running: dict[Request, None] = {}
        self._timer: asyncio.TimerHandle | None = None  # admits waiting requests
        self._last_fault = Reply("failure")
        self._told: float | None = None  # beginning of the silence that a warning told (s)

    def join(self, session: Session) -> None:
        """Apply the strictest rates of all sessions; each keeps to its own `max_workers`."""
        if session in self._sessions and len(self._sessions) == self._joined:
            return
        with self._joining:
            self._sessions.add(session)
            settings = [each.settings for each in self._sessions]
            self._joined = len(settings)
            rates: list[Any] = []
            for name in ("requests_per_minute", "tokens_per_minute"):
                stated = [getattr(each, name) for each in settings]
                rates.append(min(filter(None, stated), default=None))
            self.limits.allow(max(each.max_workers for each in settings), *rates)

    @cached_property
    def _http(self) -> Any:
        """The official client, without retries and limits of its own."""
        base_url, key = self._address
        given: Any = partial(asyncio.to_thread, key) if callable(key) else key
        timeout = openai.Timeout(None, connect=CONNECT)
        return openai.AsyncOpenAI(base_url=base_url, api_key=given, max_retries=0, timeout=timeout)

    async def send(self, request: Request) -> Reply:
        """Send a request once its turn has come, and return how that ended."""
        if not request.refused:
            request.since = perf_counter()
        request.turn = asyncio.get_running_loop().create_future()
        self._waiting[request] = None
        reply = Reply("nothing")
        try:
            self._admit()
            await request.turn
            session: Session = request.session
            reply = await session.send(self._http, request)
        finally:
            self._waiting.pop(request, None)
            if request in self._running:
                self._end(request, reply)
            self._admit()
        return reply

    def _admit(self) -> None:
        """Send the requests that have their turn, and set the timer for the next request."""
        limits = self.limits
        if self._timer is not None:
            self._timer.cancel()
        now = perf_counter()
        when = self._give_up(now)
        for request in filter(self._has_turn, [*self._waiting]):
            session: Session = request.session
            prompt, answer = session.tokens(request.items)
            ready = limits.ready_at(now, prompt + answer)
            if ready > now:
                when = min(when, ready)
                break
            cost = session.cost(*session.tokens(request.items, session.longest))
            most = session.settings.max_cost
            running = [each.cost for each in self._running if each.session is session]
            if most is not None and session.spent + sum(running) + cost > most:
                if not running:  # their true cost may be less
                    why = f"the next request may exceed max_cost={most:g}, of which "
                    why = f"{why}{session.spent:.4g} is spent"
                    self._refuse(request, Reply("nothing", why=why))
                continue
            request.cost, request.permit = cost, limits.begin(now, prompt + answer)
            request.last, request.sent = request.sent, now
            del self._waiting[request]
            self._running[request] = None
            request.turn.set_result(None)
        if when < inf:
            self._timer = clients_loop().call_later(max(0.0, when - now), self._admit)

    def _has_turn(self, request: Request) -> bool:
        """Return whether no other request goes first: a refused one waits for others."""
        others = chain(self._waiting, self._running)
        return not request.turn.done() and (  # not cancelled
            not request.refused
            or self.limits.may_tell(request.sent)
            or all(each.refused or each.sent < request.since for each in others)
        )

    def _give_up(self, now: float) -> float:
        """Fail the requests that have waited too long for a silent service, and warn once.

        Return the moment of the next failure or warning.
        """
        first, limits, fault = inf, self.limits, self._last_fault
        silent_since, held = limits.silent_since, limits.held_until
        if silent_since is None:
            return first
        for request in [*self._waiting]:
            most = request.session.settings.max_wait_s
            deadline = max(request.since, silent_since) + most
            if now < deadline and held <= deadline:
                first = min(first, deadline)
                continue
            why = (
                f"no request may be sent for {max(0.0, held - now):.0f} s, and none was answered "
                f"for {now - silent_since:.0f} s (max_wait_s={most:g}); {fault.why}"
            )
            self._refuse(request, replace(fault, outcome="failure", why=why))
        calls = [*self._waiting, *self._running]
        if self._told == silent_since or not calls:
            return first
        if now < silent_since + TELL:
            return min(first, silent_since + TELL)
        self._told = silent_since
        logger.warning(
            "%s: calls wait, because %s; the next request is sent in %.1f s (max_wait_s is the "
            "longest wait of a call)",
            calls[0].session.name,
            fault.why,
            max(now, held, limits.open_until or now) - now,
        )
        return first

    def _refuse(self, request: Request, reply: Reply) -> None:
        """End the wait of a request that is not sent."""
        del self._waiting[request]
        if not request.turn.done():
            request.turn.set_exception(request.session.error(reply, request.sendings))

    def _end(self, request: Request, reply: Reply) -> None:
        """Note the end of a sending."""
        limits, session, permit = self.limits, request.session, request.permit
        assert permit is not None
        del self._running[request]
        session.spent += request.cost if reply.cost is None else reply.cost
        now = perf_counter()
        if reply.outcome == "refusal" and limits.is_own(request.last):
            reply.outcome = "rejection"
        limits.end(permit, now, reply.outcome, asked=reply.pause, tokens=reply.tokens)
        if reply.is_fault:
            self._last_fault = reply
            if permit.probe and not limits.has_answered:
                for each in [*self._waiting]:
                    each.attempts += 1
                    if each.attempts >= each.session.settings.attempts:
                        self._refuse(each, reply)


def _failure(error: Exception) -> Reply:
    """Classify an exception of the HTTP client."""
    status, at = getattr(error, "status_code", None), ""
    if isinstance(error, openai.APIError) and status in WRONG_ADDRESS:
        at = f" ({error.request.url.netloc.decode()}{error.request.url.path})"
    if not isinstance(status, int):
        if not is_service_error(error):
            return Reply("nothing", error=error, cost=0.0)
        cause = error.__cause__
        is_sent = type(cause).__name__ not in NO_CONNECTION
        detail = f" ({type(cause).__name__}: {cause})" if cause else ""
        why = f"no answer came{at}: {error}{detail}"
        return Reply("failure", error=error, why=why, again=True, cost=None if is_sent else 0.0)
    reply = Reply(
        "rejection",
        error=error,
        why=f"the service answered {status}{at}: "
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
