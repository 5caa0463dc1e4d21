"""Server of chat completions and embeddings, in a thread of its own, that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import BaseModel

from batched.chat import ChatClient
from batched.embeddings import EmbeddingClient

BOUND: Final = 30.0
"""Seconds after which a wait counts as a hang."""


class Person(BaseModel):
    """A schema of answers."""

    name: str
    age: int


@dataclass
class Asked:
    """One request."""

    number: int  # from 0 on
    moment: float  # at which it was read (s)
    body: dict[str, Any]
    headers: dict[str, str]
    before: int  # earlier requests with the same prompt

    @property
    def texts(self) -> list[str]:
        """Texts to embed; of a chat, the last message."""
        return self.body.get("input") or [str(self.body["messages"][-1]["content"])]

    @property
    def prompt(self) -> str:
        return "|".join(self.texts)


@dataclass
class Reply:
    """Response of the server to one request."""

    text: str | None = None  # content of a regular answer; None: an answer without content
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None  # in place of the regular one, as bytes or as an object of JSON
    after: float = 0.0  # time before it is sent (s)
    # a trickle is one byte each tenth of a second
    end: Literal["whole", "reset", "hang", "trickle", "half"] = "whole"
    usage: dict[str, int | None] | None = None
    reason: str = "stop"


Behave = Callable[[Asked], Reply]


def vector_of(text: str) -> list[float]:
    """Return the vector of a text: small whole numbers, which float32 has exactly."""
    return [float(len(text)), float(zlib.crc32(text.encode()) % 65_536)]


def answer(asked: Asked) -> Reply:
    return Reply(f"re: {asked.prompt}")


def refuse(status: int = 429, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status=status, headers=named, body={"error": {"message": "not now"}})


class ChatServer:
    """The server. Any thread may replace `behave` at any time, and read the counts."""

    def __init__(self, behave: Behave = answer) -> None:
        self.behave = behave
        self.requests: list[Asked] = []
        self.seen: Counter[str] = Counter()  # prompts
        self.answered: Counter[str] = Counter()  # prompts with an answer of status 200
        self.statuses: Counter[int] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0
        self._clients: list[ChatClient[Any] | EmbeddingClient] = []
        self._gate: asyncio.Event | None = None  # answers wait for it
        self.writers: set[asyncio.StreamWriter] = set()  # of open connections
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._changed = threading.Condition()  # notified with each request and each answer
        self._thread = threading.Thread(target=self._run, name="chat server")
        self._thread.start()
        self.up()

    @property
    def moments(self) -> list[float]:
        """Moments at which requests were read (s)."""
        return [asked.moment for asked in self.requests]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def client(self, **settings: Any) -> ChatClient[Any]:
        """Return a client of this server, which is closed with it."""
        known = {"name": "chat", "max_workers": 4}
        client: ChatClient[Any] = ChatClient(self.url, "a-model", **{**known, **settings})
        self._clients.append(client)
        return client

    def embedder(self, **settings: Any) -> EmbeddingClient:
        """Return a client of embeddings, which is closed with this server."""
        known = {"name": "embedder", "max_workers": 4, "count_tokens": len}
        client = EmbeddingClient(self.url, "a-model", **{**known, **settings})
        self._clients.append(client)
        return client

    def up(self) -> None:
        self._do(self._up())

    def down(self) -> None:
        """End all connections, and refuse new connections."""
        self._do(self._down())

    def hold(self) -> None:
        """Hold all answers until `release`."""
        self._gate = asyncio.Event()

    def release(self) -> None:
        gate, self._gate = self._gate, None
        if gate is not None:
            self._loop.call_soon_threadsafe(gate.set)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true; it is checked after each request, answer and end."""
        with self._changed:
            assert self._changed.wait_for(condition, BOUND), (
                "the condition did not become true in time"
            )

    def close(self) -> None:
        self.release()
        for client in self._clients:
            client.shutdown(cancel_futures=True)
        self.down()
        _forget(self.url)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOUND)

    def _run(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(BOUND)

    async def _up(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self._server = await asyncio.start_server(self._serve, sock=listener, backlog=1024)

    async def _down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self.writers):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head)
                }
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                if not await self._answer(body, headers, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client, or this server, has left
        finally:
            with self._changed:
                self.writers.discard(writer)
                self._changed.notify_all()
            writer.close()

    async def _answer(
        self,
        body: dict[str, Any],
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        asked = Asked(len(self.requests), time.perf_counter(), body, headers, 0)
        asked.before = self.seen[asked.prompt]
        with self._changed:
            self.requests.append(asked)
            self.seen[asked.prompt] += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._changed.notify_all()
        try:
            reply = self.behave(asked)
            self.statuses[reply.status] += 1
            if self._gate is not None:
                await self._gate.wait()
            if reply.after:
                await asyncio.sleep(reply.after)
            if reply.end == "hang":
                await reader.read(1)  # until the client has left
                return False
            return await self._send(reply, asked, writer)
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify_all()

    async def _send(self, reply: Reply, asked: Asked, writer: asyncio.StreamWriter) -> bool:
        if reply.end == "reset":
            _reset(writer)
            return False
        content = reply.body if reply.body is not None else _regular(reply, asked)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        lines = [
            f"HTTP/1.1 {reply.status} Reason",
            "content-type: application/json",
            f"content-length: {len(data)}",
            f"x-request-id: req_{asked.number}",
            *(f"{name}: {value}" for name, value in reply.headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if reply.end == "half":
            writer.write(data[: len(data) // 2])
            await writer.drain()
            return False
        if reply.end == "trickle":
            for place in range(len(data)):
                writer.write(data[place : place + 1])
                await writer.drain()
                await asyncio.sleep(0.1)
            return True
        writer.write(data)
        if reply.status == 200:
            self.answered[asked.prompt] += 1
        await writer.drain()
        return True


def _regular(reply: Reply, asked: Asked) -> dict[str, Any]:
    if "input" in asked.body:
        entries = [
            {"object": "embedding", "index": place, "embedding": vector_of(text)}
            for place, text in enumerate(asked.texts)
        ]
        tokens = sum(len(text) for text in asked.texts)
        return {"object": "list", "data": entries, "usage": {"prompt_tokens": tokens}}
    message = {"role": "assistant", "content": reply.text}
    return {
        "choices": [{"index": 0, "finish_reason": reply.reason, "message": message}],
        "usage": reply.usage or {"prompt_tokens": 10, "completion_tokens": 5},
    }


def _forget(url: str) -> None:
    """Forget the limits of a server, and close its connections: a later one may have its port."""
    if (session := sys.modules.get("batched._chat.session")) is not None:
        for address in [each for each in session._services if each[1] == url]:
            service = session._services.pop(address)
            if service._http is not None:
                closing = asyncio.run_coroutine_threadsafe(
                    service._http.close(), session.clients_loop()
                )
                closing.result(BOUND)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def chat_server(behave: Behave = answer) -> Iterator[ChatServer]:
    server = ChatServer(behave)
    try:
        yield server
    finally:
        server.close()
