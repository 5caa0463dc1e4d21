"""Server of chat completions and embeddings, in threads of its own, that misbehaves on demand."""

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
from http.client import parse_headers
from socketserver import ThreadingTCPServer
from typing import IO, Any, Final, Literal

from pydantic import BaseModel

from batched.chat import ChatClient
from batched.embeddings import EmbeddingClient

BOUND: Final = 30.0
"""Seconds after which a wait counts as a hang."""
RESET: Final = struct.pack("ii", 1, 0)
"""The option of a socket that is not to linger."""


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Asked:
    number: int  # from 0 on
    moment: float  # at which it was read (s)
    body: dict[str, Any]
    headers: Any  # by name, in upper or lower case
    before: int = 0  # earlier requests with the same prompt

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


class _Listener(ThreadingTCPServer):
    """Connections, each in a thread of its own. They end without ceremony."""

    allow_reuse_address = True
    request_queue_size = 1024
    connections: set[Any]

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        request.close()


class ChatServer:
    """The server. Any thread may replace `behave` at any time, and read the counts."""

    def __init__(self, behave: Behave = answer) -> None:
        self.behave = behave  # called by one thread at a time
        self.requests: list[Asked] = []
        self.seen: Counter[str] = Counter()  # prompts
        self.statuses: Counter[int] = Counter()
        self.in_flight = 0
        self.most_in_flight = 0
        self._clients: list[Any] = []
        self._gate = threading.Event()  # answers wait for it
        self._gate.set()
        self._changed = threading.Condition()  # notified with each request and each answer
        self._port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def client(self, **settings: Any) -> Any:
        return self._made(ChatClient, {"name": "chat", **settings})

    def embedder(self, **settings: Any) -> Any:
        return self._made(EmbeddingClient, {"name": "embedder", "count_tokens": len, **settings})

    def _made(self, kind: Any, settings: dict[str, Any]) -> Any:
        self._clients.append(kind(self.url, "a-model", **{"max_workers": 4, **settings}))
        return self._clients[-1]

    def up(self) -> None:
        serve: Any = self._serve
        self._listener = _Listener(("127.0.0.1", self._port), serve)
        self._listener.connections = set()
        self._port = self._listener.server_address[1]
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,))
        self._thread.start()

    def down(self) -> None:
        self._listener.shutdown()
        for connection in list(self._listener.connections):
            with suppress(OSError):  # it has just ended
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.server_close()
        self._thread.join(BOUND)

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true; it is checked after each request and answer."""
        with self._changed:
            assert self._changed.wait_for(condition, BOUND), "it did not become true in time"

    def close(self) -> None:
        self.release()
        for client in self._clients:
            client.shutdown(cancel_futures=True)
        self.down()
        self._forget()

    def _forget(self) -> None:
        """Forget the limits, and close connections: a later server may have the same port."""
        if (session := sys.modules.get("batched._chat.session")) is not None:
            for address in [each for each in session._services if each[1] == self.url]:
                closing = session._services.pop(address)._http.close()
                loop = session.clients_loop()
                asyncio.run_coroutine_threadsafe(closing, loop).result(BOUND)

    def _serve(self, connection: socket.socket, *_: Any) -> None:
        # errors: the client, or this server, has left
        with suppress(OSError, TypeError, ValueError), connection.makefile("rb") as reader:
            while reader.readline():
                headers = parse_headers(reader)
                body = json.loads(reader.read(int(headers["content-length"])))
                with self._changed:
                    asked = Asked(len(self.requests), time.perf_counter(), body, headers)
                    asked.before = self.seen[asked.prompt]
                    reply = self.behave(asked)
                    self.requests.append(asked)
                    self.seen[asked.prompt] += 1
                    self.statuses[reply.status] += 1
                    self.in_flight += 1
                    self.most_in_flight = max(self.most_in_flight, self.in_flight)
                    self._changed.notify_all()
                self._wait(reply, reader)
                for part in _parts(reply, asked):
                    connection.sendall(part)
                    time.sleep(0.1 if reply.end == "trickle" else 0.0)
                if reply.end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                if reply.end not in ("whole", "trickle"):
                    break

    def _wait(self, reply: Reply, reader: IO[bytes]) -> None:
        """Return once a reply may be sent, or the client has left."""
        try:
            self._gate.wait()
            time.sleep(reply.after)
            if reply.end == "hang":
                reader.read(1)
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify_all()


def _parts(reply: Reply, asked: Asked) -> list[bytes]:
    if reply.end in ("reset", "hang"):
        return []
    content = _regular(reply, asked) if reply.body is None else reply.body
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [
        f"HTTP/1.1 {reply.status} Reason",
        "content-type: application/json",
        f"content-length: {len(data)}",
        f"x-request-id: req_{asked.number}",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
    ]
    head = "\r\n".join([*lines, "", ""]).encode()
    if reply.end == "trickle":
        return [head, *(data[place : place + 1] for place in range(len(data)))]
    return [head + data[: len(data) // 2 if reply.end == "half" else None]]


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


@contextmanager
def chat_server(behave: Behave = answer) -> Iterator[ChatServer]:
    server = ChatServer(behave)
    try:
        yield server
    finally:
        server.close()
