"""The middleware alone, between an application and a server that is two functions."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
import pytest

import batched
from batched.asgi import BatchedMiddleware
from batched.errors import ServerGone
from stage import BOUND

pytestmark = pytest.mark.anyio

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[[Receive, Send], Awaitable[None]]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Scope(dict[str, Any]):
    """A scope that can be referred to weakly."""


class Server:
    """A server with one request. Its client leaves with `leave`, or after the response."""

    def __init__(self, *body: bytes, missing: bool = False) -> None:
        parts = body or (b"",)
        self._to_come, self.coming = anyio.create_memory_object_stream[Message](math.inf)
        for number, part in enumerate(parts, 1):
            more = number < len(parts) or missing
            self._to_come.send_nowait({"type": "http.request", "body": part, "more_body": more})
        self.scope = Scope(type="http")
        self.sent: list[Message] = []

    def leave(self) -> None:
        self._to_come.close()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    async def receive(self) -> Message:
        try:
            return await self.coming.receive()
        except anyio.EndOfStream:
            return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.leave()
            await anyio.lowlevel.checkpoint()

    async def serve(self, handler: Handler) -> None:
        async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
            await handler(receive, send)

        with self._to_come, self.coming, anyio.fail_after(BOUND):
            await BatchedMiddleware(app)(self.scope, self.receive, self.send)


async def answer(send: Send, *, status: int = 200, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def raising(error: BaseException) -> Handler:
    async def handler(receive: Receive, send: Send) -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    return handler


@pytest.mark.parametrize(
    "error", [KeyError("missing"), ExceptionGroup("two", [ValueError()]), SystemExit(3)]
)
async def test_an_exception_of_a_handler_passes_as_itself(error: BaseException) -> None:
    server = Server()
    with pytest.raises(BaseException) as raised:
        await server.serve(raising(error))
    assert raised.value is error
    assert (error.__cause__, error.__context__) == (None, None)
    assert server.sent == []


async def test_a_refused_call_is_a_503_with_the_time_of_the_queue() -> None:
    refusals: list[tuple[Any, float, bytes, str]] = [
        (batched.QueueFull("q"), 0.2, b"1", "The server is busy"),
        (batched.QueueTimeout("q"), 1.2, b"2", "The server is busy"),
        (batched.BatcherClosed("q"), 0.0, b"1", "The server is shutting down"),
        (ServerGone("q"), 0.0, b"1", "A part of the server is not running"),
    ]
    for error, seconds, header, sentence in refusals:
        if seconds:
            error.retry_after_s = seconds
        server = Server()
        await server.serve(raising(error))
        body = server.sent[1]["body"]
        assert server.status == 503
        assert json.loads(body) == {"detail": f"{sentence}; try again later."}
        assert dict(server.sent[0]["headers"]) == {
            b"content-type": b"application/json",
            b"retry-after": header,
            b"content-length": str(len(body)).encode(),
        }


async def test_a_500_or_a_group_for_refused_calls_becomes_a_503() -> None:
    def sends(error: Exception, *, raises: bool) -> Handler:
        async def handler(receive: Receive, send: Send) -> None:
            try:
                raise error
            except Exception:
                await answer(send, status=500, body=b"Internal Server Error")
                if raises:
                    raise

        return handler

    group = ExceptionGroup("tasks", [batched.QueueFull("q"), batched.QueueFull("r")])
    for handler in (
        raising(group),
        sends(ExceptionGroup("outer", [group]), raises=True),  # as Starlette does
        sends(batched.QueueFull("q"), raises=False),  # as Litestar does
    ):
        server = Server()
        await server.serve(handler)
        assert (server.status, len(server.sent)) == (503, 2)
        assert b"busy" in server.sent[1]["body"]
    mixed = ExceptionGroup("tasks", [batched.QueueFull("q"), ValueError("of the handler")])
    with pytest.raises(ExceptionGroup) as raised:
        await Server().serve(raising(mixed))
    assert raised.value is mixed


@pytest.mark.parametrize(
    ("status", "error"), [(500, ValueError("of the handler")), (200, batched.QueueFull("q"))]
)
async def test_a_response_that_has_begun_passes(status: int, error: Exception) -> None:
    async def handler(receive: Receive, send: Send) -> None:
        try:
            raise error
        except (ValueError, batched.QueueFull):
            await send({"type": "http.response.start", "status": status, "headers": []})
            raise

    server = Server()
    with pytest.raises(type(error)) as raised:
        await server.serve(handler)
    assert raised.value is error
    assert (server.status, len(server.sent)) == (status, 1)


@pytest.mark.parametrize(
    "moment", ["before the handler", "during it", "during its response", "and send fails"]
)
async def test_a_handler_that_never_receives_is_cancelled_for_a_lost_client(moment: str) -> None:
    async def handler(receive: Receive, send: Send) -> None:
        if moment == "during its response":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
        server.leave()
        await anyio.sleep_forever()

    async def fail(message: Message) -> None:
        raise ConnectionResetError

    server = Server()
    if moment == "before the handler":
        await server.receive()
        server.leave()
    if moment == "and send fails":
        server.send = fail  # type: ignore[method-assign]  # as ASGI has it since 2.4
    await server.serve(handler)
    if moment != "and send fails":
        assert len(server.sent) == 2
        assert server.status == (200 if moment == "during its response" else 499)


async def test_a_handler_that_receives_gets_the_disconnect_and_is_not_cancelled() -> None:
    received: list[str] = []

    async def leave() -> None:
        await anyio.wait_all_tasks_blocked()
        server.leave()

    async def handler(receive: Receive, send: Send) -> None:
        await receive()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leave)
            received.append((await receive())["type"])
            received.append((await receive())["type"])

    server = Server()
    await server.serve(handler)
    assert received == ["http.disconnect", "http.disconnect"]
    assert server.sent == []


async def test_a_client_that_leaves_during_its_body_is_a_disconnect() -> None:
    received: list[str] = []

    async def handler(receive: Receive, send: Send) -> None:
        await receive()
        server.leave()
        await anyio.wait_all_tasks_blocked()  # the middleware reads ahead
        received.append((await receive())["type"])

    server = Server(b"one", missing=True)
    await server.serve(handler)
    assert received == ["http.disconnect"]
    assert server.sent == []


@pytest.mark.once
async def test_two_parts_of_a_body_are_read_ahead_and_no_more() -> None:
    ahead: list[int] = []

    async def handler(receive: Receive, send: Send) -> None:
        for number in range(len(parts)):
            await anyio.wait_all_tasks_blocked()
            waiting = server.coming.statistics().current_buffer_used
            ahead.append(len(parts) - waiting - number)
            assert (await receive())["body"] == parts[number]
        await answer(send)

    parts = [f"part {number}".encode() for number in range(20)]
    server = Server(*parts)
    await server.serve(handler)
    assert max(ahead) == 2


async def test_a_receive_in_a_cancelled_scope_loses_no_message() -> None:
    """As Starlette's `request.is_disconnected()` looks."""
    seen: list[str] = []

    async def look(receive: Receive) -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            seen.append((await receive())["type"])

    async def handler(receive: Receive, send: Send) -> None:
        await look(receive)
        assert seen == []
        assert (await receive())["body"] == b"all"
        with anyio.CancelScope(shield=True):
            server.leave()
            await anyio.wait_all_tasks_blocked()
            await look(receive)

    server = Server(b"all")
    await server.serve(handler)
    assert seen == ["http.disconnect"]


@pytest.mark.parametrize("last", ["http.response.body", "http.response.pathsend"])
async def test_code_after_the_response_is_not_cancelled(last: str) -> None:
    finished: list[bool] = []

    async def handler(receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": last})
        server.leave()
        await anyio.wait_all_tasks_blocked()
        finished.append(True)

    server = Server()
    await server.serve(handler)
    assert finished == [True]
    assert len(server.sent) == 3


async def test_websockets_and_lifespans_get_the_functions_of_the_server() -> None:
    given: list[tuple[Any, ...]] = []

    async def app(*arguments: Any) -> None:
        given.append(arguments)
        raise batched.QueueFull("q")

    receive: Any = "receive"
    send: Any = "send"
    for scope in ({"type": "websocket"}, {"type": "lifespan"}):
        with pytest.raises(batched.QueueFull):
            await BatchedMiddleware(app)(scope, receive, send)
        assert given.pop() == (scope, receive, send)


async def test_an_error_of_receive_is_raised_in_the_handler_that_receives() -> None:
    error = ValueError("the body is too large")

    async def refuse() -> Message:
        raise error

    async def handler(receive: Receive, send: Send) -> None:
        with pytest.raises(ValueError, match="too large") as raised:
            await receive()
        assert raised.value is error
        await answer(send)

    async def ignore(receive: Receive, send: Send) -> None:
        await anyio.wait_all_tasks_blocked()
        await answer(send)

    for each in (handler, ignore):
        server = Server()
        server.receive = refuse  # type: ignore[method-assign]  # as middleware around it may
        await server.serve(each)
        assert server.status == 200


async def test_a_server_that_cancels_a_handler_sees_it_cancelled() -> None:
    async def handler(receive: Receive, send: Send) -> None:
        stop.cancel()
        await anyio.lowlevel.checkpoint()

    server = Server()
    with anyio.CancelScope() as stop:
        await server.serve(handler)
    assert stop.cancelled_caught
    assert server.sent == []


@pytest.mark.once
@pytest.mark.usefixtures("uncollected")
async def test_requests_of_clients_that_leave_and_refused_ones_leave_nothing_behind() -> None:
    async def one(status: int) -> weakref.ref[Scope]:
        async def handler(receive: Receive, send: Send) -> None:
            if status == 503:
                raise batched.QueueFull("q")
            server.leave()
            await anyio.sleep_forever()

        server = Server()
        await server.serve(handler)
        assert server.status == status
        return weakref.ref(server.scope)

    tasks = len(anyio.get_running_tasks())
    scopes = [await one(status) for status in (499, 503) for _ in range(50)]
    assert not [scope for scope in scopes if scope() is not None]
    assert len(anyio.get_running_tasks()) == tasks
