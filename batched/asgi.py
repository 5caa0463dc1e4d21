"""ASGI middleware for servers whose handlers call batched functions. It works with FastAPI,
Starlette and any other ASGI application, on asyncio and on trio, and needs anyio (extra `server`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import anyio

from .errors import BatcherClosed, QueueFull, QueueTimeout

__all__ = ["BatchedMiddleware"]

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]

_BUSY: Final = b'{"detail":"The server is busy; try again in a second."}'
_CLOSING: Final = b'{"detail":"The server is shutting down; try again in a second."}'
_RETRY: Final = (b"content-type", b"application/json"), (b"retry-after", b"1")  # s

_SERVICE_UNAVAILABLE: Final = 503
_CLIENT_CLOSED_REQUEST: Final = 499  # nginx's; only middleware around this one sees it

_BODIES: Final = ("http.response.body", "http.response.pathsend", "http.response.zerocopysend")
"""Messages of which one without `more_body` ends the response."""


class BatchedMiddleware:
    """`app`, whose handlers are cancelled when their client leaves, and whose refused calls are
    answered by a 503.

    - **Clients that leave.** A handler whose request has come whole is cancelled, and what it waits
      for leaves the queue. Code that receives by itself is told by `http.disconnect`, as ever.
      Tasks that run after the response are left alone.
    - **Refused calls.** `QueueFull`, `QueueTimeout` and `BatcherClosed` that leave `app` before the
      response has started become a 503 with `Retry-After`.

    Any other exception passes as it is, and so do websockets and lifespans. Cancellation is
    anyio's: a thread is waited for, and clean-up that awaits needs a `CancelScope(shield=True)`.
    """

    def __init__(self, app: _App) -> None:
        self.app = app

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
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
        try:
            if raised is None:
                if exchange.left and not exchange.started:
                    with contextlib.suppress(OSError):  # sent to nobody
                        await _answer(send, _CLIENT_CLOSED_REQUEST)
            elif exchange.started or not isinstance(
                raised, (QueueFull, QueueTimeout, BatcherClosed)
            ):
                raise raised
            else:
                body = _CLOSING if isinstance(raised, BatcherClosed) else _BUSY
                await _answer(send, _SERVICE_UNAVAILABLE, *_RETRY, body=body)
        finally:
            del raised  # its traceback holds this frame


class _Exchange:
    """Request and response of one handler. What the client sends is read ahead, by at most two
    messages.
    """

    def __init__(self, receive: _Receive, send: _Send) -> None:
        self._receive = receive
        self._send = send
        self.arriving, self.arrived = anyio.create_memory_object_stream[_Message | Exception](1)
        # of its own, since a task of a group that ends as cancelled is garbage in a circle
        self.watching = anyio.CancelScope()
        self._listeners = 0  # tasks of the handler that receive
        self.started = False  # the response
        self.ended = False  # the response
        self.left = False  # the client, and the handler was cancelled

    async def watch(self, handling: anyio.CancelScope) -> None:
        """Reads ahead until the client leaves, and cancels a handler that does not listen."""
        more = False  # of the body is to come
        with self.watching, self.arriving:
            while True:
                try:
                    message = await self._receive()
                except Exception as error:  # of middleware that limits bodies, say
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
        self.started = self.started or kind == "http.response.start"
        self.ended = self.ended or (kind in _BODIES and not message.get("more_body", False))
        await self._send(message)


async def _answer(
    send: _Send, status: int, *headers: tuple[bytes, bytes], body: bytes = b""
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
