"""Endpoint: batch function of a client, and lifetime of the client's session."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from random import random
from typing import Any

from .limits import Limits
from .questions import Question
from .session import Counts, Session
from .settings import ChatSettings

_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


class Endpoint:
    """Owner of the session with a service.

    A session begins with the first call. The session ends with the endpoint. The session of a
    closed endpoint ends with the last call.
    """

    def __init__(self, name: str, settings: ChatSettings) -> None:
        self._name = name  # of the client
        self._settings = settings
        self._closed = False
        self._begin_anew()
        _endpoints.add(self)

    def _begin_anew(self) -> None:
        # guards the session and the calls; reentrant, because finalizers may close the client
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._calls = 0  # under way
        settings = self._settings
        self.limits = Limits(
            settings.max_workers,
            settings.requests_per_minute,
            settings.tokens_per_minute,
            random=random,
        )
        self.counts = Counts()

    def ask(self, question: Question) -> Any:
        """Return the result for `question`, and block the calling thread until then."""
        with self._lock:
            session = self._session
            if session is None:
                session = Session(self._name, self._settings, self.limits, self.counts)
                self._session = session
            self._calls += 1
        try:
            return asyncio.run_coroutine_threadsafe(session.ask(question), session.loop).result()
        finally:
            with self._lock:
                self._calls -= 1
            self._stop_if_unused(wait=False)

    def open(self) -> None:
        """Keep sessions between calls again."""
        with self._lock:
            self._closed = False

    def close(self, *, wait: bool) -> None:
        """Stop the session now, or after the last call that is under way.

        With `wait`, return when a session that stops now has ended.
        """
        with self._lock:
            self._closed = True
        self._stop_if_unused(wait=wait)

    def _stop_if_unused(self, *, wait: bool) -> None:
        with self._lock:
            session = self._session
            if session is None or self._calls or not self._closed:
                return
            self._session = None
        session.stop()
        if wait:
            session.join()

    def __del__(self) -> None:
        if self._session is not None:
            self._session.stop()


def _after_fork() -> None:
    """Give each endpoint a new lock, and no session: its thread runs in the parent only."""
    for endpoint in list(_endpoints):
        # the stack of the lost thread still refers to the session, so no connection is closed here
        endpoint._begin_anew()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
