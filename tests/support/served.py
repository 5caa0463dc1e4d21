"""Model processes for tests, each in a thread of this process instead of a process of its own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from batched._connect.place import Place, listen
from batched._connect.server import ModelServer

PATIENCE = 20.0
"""Seconds after which a wait counts as a hang."""


class Served:
    """A batched function, served on a socket of its own until `stop`."""

    def __init__(self, function: Any, credit: int = 10_000) -> None:
        self._folder = tempfile.mkdtemp()
        self.path = Path(self._folder, "served.socket")
        self.address = f"unix:{self.path}"
        self.server = ModelServer(function, listen(self.path), Place(self.path), None)
        self.server._greeting["credit"] = credit
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        assert self._ready.wait(PATIENCE)

    async def _run(self) -> None:
        await self.server.run(self._ready.set)

    def stop(self, *, wait: bool = True) -> None:
        with suppress(RuntimeError):  # it has ended already
            self.server.loop.call_soon_threadsafe(self.server.stop)
        if wait:
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive()
            shutil.rmtree(self._folder, ignore_errors=True)


class ServedDecorator:
    """Decorator that serves a function, and returns a function that is connected to it.

    The decorator takes the settings of the served function.
    """

    def __init__(self, decorator: Any, connect: Any) -> None:
        self._decorator = decorator
        self._connect = connect
        self.served: list[Served] = []

    def __call__(self, *args: Any, **settings: Any) -> Any:
        made = self._decorator(*args, **settings)
        if args:
            return self._connected(made)
        return lambda function: self._connected(made(function))

    def _connected(self, function: Any) -> Any:
        served = Served(function)
        self.served.append(served)
        return self._connect(served.address)

    def stop(self) -> None:
        while self.served:
            self.served.pop().stop()
