"""Fixtures: a server that misbehaves on demand, and short pauses."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from batched._chat import limits
from chat_server import ChatServer, chat_server

if importlib.util.find_spec("openai") is None:
    collect_ignore = [f"test_{name}.py" for name in ("client", "embeddings", "faults", "offline")]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, except for pauses that the server names."""
    monkeypatch.setattr("batched._chat.session.FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(limits, "MOST_PAUSE", 0.2)
