"""ASGI middleware for servers with handlers that call batched functions.

The middleware works with FastAPI, Starlette and any other ASGI application, on asyncio and on trio.
It needs anyio (extra `server`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from ._installation import needs
from .errors import BatcherClosed, QueueFull, QueueTimeout, ServerGone

with needs("batched.asgi", "server"):
    import anyio

__all__ = ["BatchedMiddleware"]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

_BUSY: Final = b'{"detail":"The server is busy; try again later."}'
_CLOSING: Final = b'{"detail":"The server is shutting down; try again later."}'
_GONE: Final = b'{"detail":"A part of the server is not running; try again later."}'

_REFUSALS: Final = (QueueFull, QueueTimeout, BatcherClosed)

_SERVER_ERROR: Final = 500
_SERVICE_UNAVAILABLE: Final = 503
_CLIENT_CLOSED_REQUEST: Final = 499  # of nginx; only middleware around this one sees it

_BODIES: Final = ("http.response.body", "http.response.pathsend", "http.response.zerocopysend")
"""Messages of which one without `more_body` ends the response."""


class BatchedMiddleware:
    """`app`, with handlers that are cancelled when clients leave, and a 503 for refused calls.

    - **Clients that leave.** A handler is cancelled once its request has arrived whole, and its
      calls leave the queue. Code that receives by itself gets `http.disconnect`, as without the
      middleware. Tasks that run after the response are left alone.
    - **Refused calls.** `QueueFull`, `QueueTimeout` and `BatcherClosed` that leave `app` before the
      response has started, alone or in the exception group of a task group, become a 503. Its
      `Retry-After` is the time in which the present queue will have run or a model process is
      started again, at least a second. So does a 500 that `app` sends while it handles one of
      them, as Starlette does.

    Any other exception passes as it is, and so do websockets and lifespans. Cancellation is
    anyio's: a thread is waited for, and clean-up that awaits needs a `CancelScope(shield=True)`.
    """

    def __init__(self, app: _App) -> None:
        self.app = app

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        """Handle one request, or pass on a websocket or a lifespan."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(receive, send)
        raised: BaseException | None = None
        with exchange.arrived:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(exchange.watch, tasks.cancel_scope)
                try:
                    await self.app(scope, exchange.receive, exchange.send)
                except (Exception, KeyboardInterrupt, SystemExit) as error:
                    raised = error  # the group would wrap it
                exchange.watching.cancel()
        refusal = _find_refusal(raised)
        try:
            if raised is None:
                if exchange.left and not exchange.started:
                    with contextlib.suppress(OSError):  # the client is gone
                        await _answer(send, _CLIENT_CLOSED_REQUEST)
            elif refusal is None:
                raise raised
            elif not exchange.started:
                await _refuse(send, refusal)
            elif not exchange.refused:
                raise raised
        finally:
            del raised, refusal  # their tracebacks hold this frame


class _Exchange:
    """Request and response of one handler. Messages of the client are read ahead, at most two."""

    def __init__(self, receive: _Receive, send: _Send) -> None:
        self._receive = receive
        self._send = send
        self.arriving, self.arrived = anyio.create_memory_object_stream[_Message | Exception](1)
        # a scope of its own, since a cancelled task of a group is garbage in a reference cycle
        self.watching = anyio.CancelScope()
        self._listeners = 0  # tasks of the handler that receive
        self.started = False  # the response
        self.ended = False  # the response
        self.refused = False  # the response is a 503 in place of the handler's 500
        self.left = False  # the client, and the handler was cancelled

    async def watch(self, handling: anyio.CancelScope) -> None:
        """Read ahead until the client leaves, and cancel a handler that does not listen."""
        more = False  # of the body is to come
        with self.watching, self.arriving:
            while True:
                try:
                    message = await self._receive()
                except Exception as error:  # for example of middleware that limits bodies
                    await self.arriving.send(error)
                    return
                if message["type"] == "http.disconnect":
                    break
                more = message.get("more_body", False)
                await self.arriving.send(message)
            if not (more or self._listeners or self.ended):
                self.left = True
                handling.cancel()

    async def receive(self) -> _Message:
        self._listeners += 1
        try:
            try:
                message = self.arrived.receive_nowait()  # even in a scope that is cancelled
            except anyio.WouldBlock:
                message = await self.arrived.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            return {"type": "http.disconnect"}
        finally:
            self._listeners -= 1
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: _Message) -> None:
        kind = message["type"]
        if kind == "http.response.start" and message["status"] == _SERVER_ERROR:
            handled = _find_refusal(sys.exception())  # which the caller handles
            if handled is not None:
                self.started = self.ended = self.refused = True
                await _refuse(self._send, handled)
        if self.refused:
            return
        self.started = self.started or kind == "http.response.start"
        self.ended = self.ended or (kind in _BODIES and not message.get("more_body", False))
        await self._send(message)


def _find_refusal(error: BaseException | None) -> BaseException | None:
    """Return `error` if it is a refusal, the first one if it is a group of refusals, else None."""
    while isinstance(error, BaseExceptionGroup) and error.split(_REFUSALS)[1] is None:
        error = error.exceptions[0]
    return error if isinstance(error, _REFUSALS) else None


async def _refuse(send: _Send, error: BaseException) -> None:
    body = _CLOSING if isinstance(error, BatcherClosed) else _BUSY
    if isinstance(error, ServerGone):
        body = _GONE
    seconds = max(1, math.ceil(getattr(error, "retry_after_s", 0.0)))
    headers = (b"content-type", b"application/json"), (b"retry-after", b"%d" % seconds)
    await _answer(send, _SERVICE_UNAVAILABLE, *headers, body=body)


async def _answer(
    send: _Send, status: int, *headers: tuple[bytes, bytes], body: bytes = b""
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
