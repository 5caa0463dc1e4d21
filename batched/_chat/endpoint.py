"""Endpoint: the batch function of a client, and the life of its session."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Any

from .questions import Question
from .session import Counts, Service, Session

_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()


class Endpoint:
    """Asks a service. Its session begins with the first call, and ends with this object or, once
    that is closed, with the last call.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._begin_anew()
        _endpoints.add(self)

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()  # guards what follows; a finalizer may break in on it
        self._session: Session | None = None
        self._finalizer: weakref.finalize[..., Endpoint] | None = None
        self._calls = 0  # under way
        self._closed = False
        self.limits = self.service.limits()
        self.counts = Counts()

    def ask(self, question: Question) -> Any:
        """The result for `question`; blocks the calling thread meanwhile."""
        with self._lock:
            session = self._running()
            self._calls += 1
        try:
            return asyncio.run_coroutine_threadsafe(session.ask(question), session.loop).result()
        finally:
            with self._lock:
                self._calls -= 1
                ended = self._ended()
            if ended is not None:
                ended.stop()

    def open(self) -> None:
        with self._lock:
            self._closed = False

    def close(self, *, wait: bool) -> None:
        """Ends the session with the last call or, if there is none, now; with `wait`, returns when
        that is done.
        """
        with self._lock:
            self._closed = True
            ended = self._ended()
        if ended is not None:
            ended.stop()
            if wait:
                ended.join()

    def _running(self) -> Session:
        if self._session is None:
            session = Session(self.service, self.limits, self.counts)
            session.start()
            self._session = session
            self._finalizer = weakref.finalize(self, session.stop)
            self._finalizer.atexit = False  # calls that were accepted are finished after that
        return self._session

    def _ended(self) -> Session | None:
        """The session, if it is to end now."""
        if not self._closed or self._calls or self._session is None:
            return None
        session, self._session = self._session, None
        if self._finalizer is not None:
            self._finalizer.detach()
        return session

    def after_fork(self) -> None:
        """Forgets, in the child, what runs in the parent only. The thread that it had there keeps
        the session, so that nothing of it is closed here.
        """
        if self._finalizer is not None:
            self._finalizer.detach()
        closed = self._closed
        self._begin_anew()
        self._closed = closed


def _after_fork() -> None:
    for endpoint in list(_endpoints):
        endpoint.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
