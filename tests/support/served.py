"""Model processes for tests, each in a thread of this process instead of a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from batched._connect.place import Place
from batched._connect.server import ModelServer

PATIENCE = 20.0
"""Seconds after which a wait counts as a hang."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that can import the modules that tests import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def model_processes(folder: Path) -> list[int]:
    """Return the processes whose socket is in `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def dialed(connected: Any) -> socket.socket:
    """Return a new connection to the process of a function, which has not greeted."""
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(PATIENCE)
    link.connect(str(connected.served.path))
    return link


class Served:
    """A batched function, served on a socket of its own until `stop`."""

    def __init__(self, function: Any) -> None:
        self._folder = tempfile.mkdtemp()
        self.path = Path(self._folder, "served.socket")
        self.address = f"unix:{self.path}"
        place = Place(self.path)
        self.server = ModelServer(function, place.listen(), place)
        ready = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(ready.set,), daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE)

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        shutil.rmtree(self._folder, ignore_errors=True)
