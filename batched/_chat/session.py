"""Session: the requests of one client in one process.

1. Calls get permits in the order of their arrival, as `Limits` allow. One timer is set: for the
   next moment at which a call may get a permit, or must fail.
2. A refusal costs no attempt. A failure while the breaker is open costs none either, unless the
   prompt may be its cause: HTTP 500, or a time limit.
3. `max_wait_s` bounds the wait of a refused call, from its first refusal. While the service answers
   no request at all, `max_wait_s` bounds the wait of every call. That wait is counted from the
   arrival of the call or from the first fault, whichever is later.
4. Every other failure, and every unusable answer, costs one attempt. The next attempt follows after
   a pause of that call alone.
5. All sessions of a process share one event loop, in a daemon thread. The state of a session is
   changed by that thread only.
6. Connections are closed once no request has run for `IDLE`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
from collections import deque
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, Final

import openai

from .._runtime.timer_thread import daemon_thread
from .._services.errors import is_service_error, retry_after
from ..errors import ChatError
from .answers import Tokens, Unusable, message_of, read_answer, read_result
from .limits import Limits, Outcome, Permit
from .questions import Question
from .settings import ChatSettings

REFUSALS: Final = (429, 503)
"""HTTP statuses that mean "not now": too many requests, service unavailable."""
OWN_FAULT: Final = 500
"""HTTP status of a service that is up and fails on the prompt. Most other statuses from 501 on come
from a proxy in front of a service that is down.
"""
NO_CREDIT: Final = "insufficient_quota"
"""Code of a 429 that no wait resolves."""
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


@dataclass
class Counts:
    """Counts of requests and tokens so far, changed by the thread of the loop only."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Turn:
    """A call that waits for a permit."""

    permit: asyncio.Future[Permit]
    tokens: int
    since: float
    """Moment of its arrival, or of its first refusal (s)."""


@dataclass(slots=True)
class _Reply:
    """The end of one request."""

    outcome: Outcome
    result: Any = None
    error: BaseException | None = None
    """Reason why there is no result."""
    why: str = ""
    """Description of `error` for messages."""
    again: bool = False
    """Whether another request may have a result."""
    request_id: str | None = None
    status: int | None = None
    pause: float | None = None
    """Pause that the service asks for (s)."""
    tokens: int | None = None
    """Tokens that the request took; None: unknown."""

    @property
    def is_fault(self) -> bool:
        """Whether the service is at fault."""
        return self.outcome in ("refusal", "failure", "time limit")


@functools.cache
def loop_of(_: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients in a process, by its id, and start its thread."""
    loop = asyncio.new_event_loop()
    daemon_thread("loop-of-chats", loop.run_forever).start()
    return loop


class Session:
    """Requests of one client in one process, and their limits."""

    def __init__(self, name: str, settings: ChatSettings) -> None:
        self._name = name  # of the client, for messages
        self._settings = settings
        self.limits = Limits(
            settings.max_workers,
            settings.requests_per_minute,
            settings.tokens_per_minute,
            random=random.random,
        )
        self.counts = Counts()
        self._loop = loop_of(os.getpid())
        self._http: Any = None  # its connections; None: there are none
        self._idle: asyncio.TimerHandle | None = None  # closes the connections
        self._waiting: deque[_Turn] = deque()
        self._timer: asyncio.TimerHandle | None = None  # admits waiting calls
        self._last_fault = ""  # of the service
        self._usual_answer = float(USUAL_ANSWER)  # tokens

    def ask(self, question: Question) -> Any:
        """Return the result for `question`, and block the calling thread until then."""
        return asyncio.run_coroutine_threadsafe(self._ask(question), self._loop).result()

    async def _ask(self, question: Question) -> Any:
        """Return the result for `question`, after as many requests as needed.

        Raises:
            ChatError: there is no result.
            Exception: the question cannot be sent.
        """
        settings, limits = self._settings, self.limits
        attempts = requests = 0
        since: float | None = None  # moment of the first refusal (s)
        while True:
            tokens = 0
            if settings.tokens_per_minute is not None:
                tokens = question.prompt_tokens + (question.most_tokens or int(self._usual_answer))
            permit = await self._turn(tokens, perf_counter() if since is None else since)
            requests += 1
            reply = await self._request(question, permit)
            if reply.error is None:
                return reply.result
            if reply.outcome == "nothing":
                raise reply.error
            is_free = reply.outcome == "refusal" or (
                reply.outcome == "failure"
                and reply.status != OWN_FAULT
                and limits.open_until is not None
            )
            if is_free:
                now = perf_counter()
                since = now if since is None else since
                is_last = now - since >= settings.max_wait_s
            else:
                attempts += 1
                is_last = attempts >= settings.attempts
            if is_last or not reply.again:
                raise self._error(reply, requests) from reply.error
            if not is_free:
                longest = min(MOST_BACKOFF, FIRST_BACKOFF * 2.0 ** min(attempts - 1, 60))
                await asyncio.sleep(longest * (1 + random.random()) / 2)
            self.counts.retries += 1

    def _error(self, reply: _Reply, requests: int) -> ChatError:
        tried = f" ({requests} requests)" if requests > 1 else ""
        request = f" [request {reply.request_id}]" if reply.request_id else ""
        error = ChatError(f"{self._name}: {reply.why}{tried}{request}")
        error.request_id, error.status_code = reply.request_id, reply.status
        error.is_service = reply.is_fault
        return error

    # permits

    async def _turn(self, tokens: int, since: float) -> Permit:
        """Return a permit for one request, once it is this call's turn.

        Raises:
            ChatError: the service answers no request, and `max_wait_s` is too short for its end.
        """
        turn = _Turn(self._loop.create_future(), tokens, since)
        self._waiting.append(turn)
        self._admit()
        return await turn.permit

    def _admit(self) -> None:
        """Give permits to the calls whose turn has come, and set the timer for the next call."""
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
            self._timer = self._loop.call_later(max(0.0, when - now), self._admit)

    def _give_up(self, now: float, silent_since: float) -> float:
        """Fail the calls that have waited too long for a silent service.

        Return the moment at which the next call will have waited too long.
        """
        first, held = inf, self.limits.held_until
        most = self._settings.max_wait_s
        for turn in list(self._waiting):
            deadline = max(turn.since, silent_since) + most
            if now < deadline and held <= deadline:
                first = min(first, deadline)
                continue
            self._waiting.remove(turn)
            how = (
                f"asks to wait for {held - now:.0f} s"
                if held > deadline
                else f"has answered nothing for {now - silent_since:.0f} s"
            )
            why = f"the service {how} (max_wait_s={most:g}); {self._last_fault}"
            turn.permit.set_exception(self._error(_Reply("failure", why=why), 0))
        return first

    # requests

    async def _request(self, question: Question, permit: Permit) -> _Reply:
        """Send one request, and tell the limits how it ended."""
        reply = _Reply("nothing")
        self.counts.requests += 1
        try:
            reply = await self._send(question)
        finally:
            self.limits.end(
                permit, perf_counter(), reply.outcome, asked=reply.pause, tokens=reply.tokens
            )
            if reply.is_fault:
                self._last_fault = reply.why
            if self._idle is not None:
                self._idle.cancel()
            self._idle = self._loop.call_later(IDLE, self._disconnect)
            self._admit()
        return reply

    def _disconnect(self) -> None:
        """Close the connections, unless a request runs, whose end starts the timer anew."""
        if self._http is not None and not self.limits.in_flight:
            self._closing = self._loop.create_task(self._http.close())
            self._http = None

    async def _send(self, question: Question) -> _Reply:
        """Send one request, and read its answer."""
        settings = self._settings
        if self._http is None:
            self._http = _http_client(settings)
        # a limit for the whole answer, even if it arrives byte by byte
        limit = asyncio.timeout(settings.timeout_s)
        try:
            async with limit:
                raw = await self._http.chat.completions.with_raw_response.create(
                    model=settings.model, messages=question.messages, **question.parameters
                )
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                return _failure(error)
            why = f"no whole answer came within {settings.timeout_s:g} s (timeout_s)"
            return _Reply("time limit", error=error, why=why, again=True)
        reply = _Reply("rejection", request_id=raw.headers.get("x-request-id"))
        try:
            answer = read_answer(raw.http_response.content)
            if isinstance(tokens := answer.usage, Tokens):
                prompt, completion = tokens.prompt_tokens, tokens.completion_tokens
                reply.tokens = prompt + completion
                self.counts.prompt_tokens += prompt
                self.counts.completion_tokens += completion
                self._usual_answer += WEIGHT * (completion - self._usual_answer)
            reply.result = read_result(answer, settings.schema)
            reply.outcome = "answer"
        except Unusable as error:
            reply.error, reply.why, reply.again = error, str(error), error.again
        return reply


def _failure(error: Exception) -> _Reply:
    """Classify an exception of the HTTP client."""
    status = getattr(error, "status_code", None)
    if not isinstance(status, int):
        if not is_service_error(error):
            return _Reply("nothing", error=error)
        cause = error.__cause__
        detail = f" ({type(cause).__name__}: {cause})" if cause is not None else ""
        why = f"no answer came: {error}{detail}"
        return _Reply("failure", error=error, why=why, again=True)
    reply = _Reply(
        "rejection",
        error=error,
        why=f"the service answered {status}: "
        f"{message_of(getattr(error, 'body', None) or str(error))}",
        request_id=getattr(error, "request_id", None),
        status=status,
    )
    if status in REFUSALS:
        reply.outcome, reply.again = "refusal", getattr(error, "code", None) != NO_CREDIT
        reply.pause, reply.tokens = retry_after(error), 0
    elif is_service_error(error):
        reply.outcome, reply.again = "failure", True
    return reply


def _http_client(settings: ChatSettings) -> Any:
    """Return the official client, without retries and time limits of its own."""
    count = settings.max_workers
    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
        max_connections=count, max_keepalive_connections=count
    )
    return openai.AsyncOpenAI(
        base_url=settings.base_url,
        # a local server accepts any key, and the official client requires one
        api_key=settings.api_key or os.environ.get("OPENAI_API_KEY") or "none",
        max_retries=0,
        timeout=None,
        http_client=openai.DefaultAsyncHttpxClient(limits=limits, timeout=None),
    )
