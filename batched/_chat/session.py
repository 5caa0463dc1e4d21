"""The requests of one client: an event loop in a thread of its own, on which every call waits for
its turn, asks, and asks again where that is worth it.

1. Calls are let through in the order in which they come, as `Limits` allow. One timer is set, for
   the first moment at which another may go, or gives up.
2. A refusal costs a call none of its attempts. Neither does a failure while the breaker is open,
   unless it may be the prompt's: HTTP 500, or a time limit that passes. What bounds the others is
   `max_wait_s`: since the call was first refused and, of a service that answers nobody, since its
   first fault.
3. Whatever else may be better the next time, failures and unusable answers, is one attempt each,
   after a pause of the call's own.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, Final

from .._runtime.shift import daemon_thread
from .._services.errors import is_service_error, retry_after
from ..errors import ChatError
from .answers import Unusable, message_of, parse_body, read_result, read_tokens
from .limits import Limits, Outcome, Permit
from .questions import Question

REFUSALS: Final = (429, 503)
"""HTTP statuses that mean "not now": too many requests, service unavailable."""
OWN_FAULT: Final = 500
"""HTTP status of a service that is there, and breaks on the prompt; most others come from what
stands before one that is not.
"""
NO_CREDIT: Final = "insufficient_quota"
"""Code of a 429 that no wait mends."""
FIRST_BACKOFF: Final = 0.5
"""Longest pause before the second attempt (s); twice as long before each further one."""
MOST_BACKOFF: Final = 30.0
"""Longest of these (s)."""
USUAL_ANSWER: Final = 256
"""Tokens that an answer is expected to have before any was seen."""
WEIGHT: Final = 0.05
"""Weight of a new answer in the expected length."""


@dataclass(frozen=True)
class Service:
    """Settings of a client, as its requests need to know them."""

    name: str
    """Of the client, for messages and threads."""
    base_url: str
    model: str
    api_key: str | None
    schema: Any
    """Pydantic class of the results; None: they are texts."""
    response_format: Any
    """Description of it for the service."""
    max_workers: int
    timeout_s: float
    attempts: int
    max_wait_s: float
    requests_per_minute: int | None
    tokens_per_minute: int | None

    def limits(self) -> Limits:
        return Limits(
            self.max_workers,
            self.requests_per_minute,
            self.tokens_per_minute,
            random=random.random,
        )


@dataclass
class Counts:
    """Counts of what was asked and answered so far; written on the loop alone."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Turn:
    """A call that waits for its turn."""

    permit: asyncio.Future[Permit]
    tokens: int
    since: float
    """When it came, or was first refused (s)."""


@dataclass(slots=True)
class _Reply:
    """End of one request."""

    outcome: Outcome
    result: Any = None
    error: BaseException | None = None
    """Why there is no result."""
    why: str = ""
    """The same for people."""
    again: bool = False
    """True if another request may have one."""
    request_id: str | None = None
    status: int | None = None


@dataclass(eq=False)
class Session:
    """A loop and its thread, from the first call to `stop`."""

    service: Service
    limits: Limits
    counts: Counts
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self._waiting: deque[_Turn] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._last_fault = ""  # of the service
        self._usual_answer = float(USUAL_ANSWER)  # tokens
        self._stopped = asyncio.Event()
        self._thread = daemon_thread(f"{self.service.name}-loop", self._run)

    def start(self) -> None:
        try:
            self._http = _http_client(self.service)
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise

    def stop(self) -> None:
        """Ends the loop, its thread and the connections, from any thread and any finalizer."""
        try:
            self.loop.call_soon_threadsafe(self._stopped.set)
        except RuntimeError:  # closed already
            pass

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self._http:
            await self._stopped.wait()

    async def ask(self, question: Question) -> Any:
        """The result for `question`.

        Raises:
            ChatError: there is none.
            Exception: it cannot be sent.
        """
        service, limits = self.service, self.limits
        attempts = requests = 0
        since: float | None = None  # when it was first refused
        while True:
            tokens = 0
            if service.tokens_per_minute is not None:
                tokens = question.prompt_tokens + (question.most_tokens or int(self._usual_answer))
            permit = await self._turn(tokens, perf_counter() if since is None else since)
            requests += 1
            reply = await self._request(question, permit)
            if reply.error is None:
                return reply.result
            now = perf_counter()
            costs_nothing = reply.outcome == "refusal" or (
                limits.open_until is not None
                and reply.outcome == "failure"
                and reply.status != OWN_FAULT
            )
            if costs_nothing:
                since = now if since is None else since
                gives_up = now - since >= service.max_wait_s
            else:
                attempts += 1
                gives_up = attempts >= service.attempts
            if reply.outcome == "nothing":
                raise reply.error
            if gives_up or not reply.again:
                raise self._error(reply, requests) from reply.error
            if not costs_nothing:
                longest = min(MOST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempts - 1, 60))
                await asyncio.sleep(longest * (1 + random.random()) / 2)
            self.counts.retries += 1

    def _error(self, reply: _Reply, requests: int) -> ChatError:
        tried = f" ({requests} requests)" if requests > 1 else ""
        request = f" [request {reply.request_id}]" if reply.request_id else ""
        error = ChatError(f"{self.service.name}: {reply.why}{tried}{request}")
        error.request_id, error.status_code = reply.request_id, reply.status
        error.is_service = reply.outcome in ("refusal", "failure", "time limit")
        return error

    # turns

    async def _turn(self, tokens: int, since: float) -> Permit:
        """Permit for one request, once it is this call's turn.

        Raises:
            ChatError: the service answers nobody, and will not do so in time.
        """
        turn = _Turn(self.loop.create_future(), tokens, since)
        self._waiting.append(turn)
        self._admit()
        return await turn.permit

    def _admit(self) -> None:
        """Gives permits to those whose turn it is, and sets the timer for the next one."""
        limits, waiting = self.limits, self._waiting
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now, when = perf_counter(), inf
        while waiting and (when := limits.ready_at(now, waiting[0].tokens)) <= now:
            turn = waiting.popleft()
            turn.permit.set_result(limits.begin(now, turn.tokens))
        if limits.silent_since is not None:
            when = min(when, self._give_up(now, limits.silent_since))
        if waiting and when < inf:
            self._timer = self.loop.call_later(max(0.0, when - now), self._admit)

    def _give_up(self, now: float, silent_since: float) -> float:
        """Ends calls that have waited too long for a service that answers nobody; the moment at
        which the next one will have.
        """
        first = inf
        for turn in list(self._waiting):
            deadline = max(turn.since, silent_since) + self.service.max_wait_s
            held = self.limits.held_until
            if now < deadline and held <= deadline:
                first = min(first, deadline)
                continue
            self._waiting.remove(turn)
            how = (
                f"asks to wait for {held - now:.0f} s"
                if held > deadline
                else f"has answered nothing for {now - silent_since:.0f} s"
            )
            why = f"the service {how} (max_wait_s={self.service.max_wait_s:g}); {self._last_fault}"
            turn.permit.set_exception(self._error(_Reply("failure", why=why), 0))
        return first

    # one request

    async def _request(self, question: Question, permit: Permit) -> _Reply:
        """Outcome of one request; the limits know of it, too."""
        asked = spent = None
        reply = _Reply("nothing")
        self.counts.requests += 1
        try:
            reply, spent = await self._send(question)
            if reply.outcome == "refusal" and reply.error is not None:
                asked, spent = retry_after(reply.error), 0
        finally:
            self.limits.end(permit, perf_counter(), reply.outcome, asked=asked, tokens=spent)
            if reply.outcome in ("refusal", "failure", "time limit"):
                self._last_fault = reply.why
            self._admit()
        return reply

    async def _send(self, question: Question) -> tuple[_Reply, int | None]:
        """Outcome of one request, and the tokens that it took, if that is known."""
        service, parameters = self.service, dict(question.parameters)
        if service.response_format is not None:
            parameters["response_format"] = service.response_format
        # of all of it, also of an answer that comes byte by byte
        limit = asyncio.timeout(service.timeout_s)
        try:
            async with limit:
                raw = await self._http.chat.completions.with_raw_response.create(
                    model=service.model, messages=question.messages, **parameters
                )
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                return _failure(error), None
            why = f"no whole answer came within {service.timeout_s:g} s (timeout_s)"
            return _Reply("time limit", error=error, why=why, again=True), None
        reply = _Reply("rejection", request_id=raw.headers.get("x-request-id"))
        tokens = None
        try:
            body = parse_body(raw.http_response.content)
            tokens = read_tokens(body)
            reply.result = read_result(body, service.schema)
            reply.outcome = "answer"
        except Unusable as error:
            reply.error, reply.why, reply.again = error, str(error), error.again
        if tokens is None:
            return reply, None
        self.counts.prompt_tokens += tokens.prompt
        self.counts.completion_tokens += tokens.completion
        self._usual_answer += WEIGHT * (tokens.completion - self._usual_answer)
        return reply, sum(tokens)


def _failure(error: Exception) -> _Reply:
    """Meaning of an exception of the HTTP client."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        body = getattr(error, "body", None)
        reply = _Reply(
            "rejection",
            error=error,
            why=f"the service answered {status}: {message_of(body or str(error))}",
            request_id=getattr(error, "request_id", None),
            status=status,
        )
        if status in REFUSALS:
            reply.outcome, reply.again = "refusal", getattr(error, "code", None) != NO_CREDIT
        elif is_service_error(error):
            reply.outcome, reply.again = "failure", True
        return reply
    if is_service_error(error):
        cause = error.__cause__
        detail = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
        return _Reply("failure", error=error, why=f"no answer came: {error}{detail}", again=True)
    return _Reply("nothing", error=error)


def _http_client(service: Service) -> Any:
    """The official client, without retries or time limits of its own."""
    import openai

    count = service.max_workers
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=count, max_keepalive_connections=count
    )
    return openai.AsyncOpenAI(
        base_url=service.base_url,
        api_key=service.api_key,
        max_retries=0,
        timeout=None,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=None),
    )
