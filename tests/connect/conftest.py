"""Fixtures of the tests of model processes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from served import Served, model_processes

import batched


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a temporary folder whose path leaves room for the name of a socket."""
    path = tempfile.mkdtemp(prefix="b")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of the sockets of this test. Kill the model processes that are left."""
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("SERVED_LOG", str(short_path / "computed.txt"))
    sockets = short_path / f"batched-{os.geteuid()}"
    yield sockets
    for pid in model_processes(sockets):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def connected(folder: Path) -> Iterator[Callable[..., Any]]:
    """Return a maker of functions that are connected to `served_model`. Close them in the end."""
    made: list[Any] = []

    def connect(name: str = "double", kind: Any = batched.connect, **settings: Any) -> Any:
        made.append(kind(f"served_model:{name}", **{"linger_s": 1, **settings}))
        return made[-1]

    yield connect
    for each in made:
        each.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def served(folder: Path) -> Iterator[Callable[..., Any]]:
    """Serve functions on sockets of this process. Stop the servers in the end.

    The fixture returns a maker of connected functions.
    """
    servers: list[Served] = []
    made: list[Any] = []

    def serve(function: Any, kind: Any = batched.connect, **settings: Any) -> Any:
        servers.append(Served(function))
        made.append(kind(servers[-1].address, **settings))
        made[-1].served = servers[-1]
        return made[-1]

    yield serve
    for each in made:
        each.shutdown(wait=False, cancel_futures=True)
    for server in servers:
        server.stop()
