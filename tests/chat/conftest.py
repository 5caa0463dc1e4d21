"""Fixtures: a server that misbehaves on demand, and clients that are closed after the test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from batched._chat import limits, session
from batched.chat import ChatClient
from chat_server import ChatServer, chat_server

Make = Callable[..., ChatClient[Any]]

if importlib.util.find_spec("openai") is None:
    collect_ignore = ["test_client.py", "test_faults.py", "test_load.py", "test_offline.py"]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.fixture
def client_of() -> Iterator[Make]:
    """A function that returns a client of a server."""
    made: list[ChatClient[Any]] = []

    def make(server: ChatServer, **settings: Any) -> ChatClient[Any]:
        known = {"name": "chat", "max_workers": 4}
        made.append(ChatClient(server.url, "a-model", **{**known, **settings}))
        return made[-1]

    yield make
    for client in made:
        client.shutdown(cancel_futures=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, except for pauses that the server names."""
    monkeypatch.setattr(session, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(limits, "MOST_PAUSE", 0.2)
