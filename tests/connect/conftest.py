"""Fixtures of the tests of model processes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from served import Served, model_processes

import batched


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a temporary folder whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as path:
        yield Path(path)


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
def modules(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose modules all processes of this test can import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def connected(folder: Path) -> Iterator[Callable[..., Any]]:
    """Return a maker of functions that are connected to `served_model`. Close them in the end."""
    with ExitStack() as ends:

        def connect(name: str = "double", kind: Any = batched.connect, **settings: Any) -> Any:
            made = kind(f"served_model:{name}", **{"linger_s": 1, **settings})
            ends.callback(made.shutdown, wait=False, cancel_futures=True)
            return made

        yield connect


@pytest.fixture
def served(folder: Path) -> Iterator[Callable[..., Any]]:
    """Return a maker of functions that are connected to servers in this process. End them all."""
    with ExitStack() as ends:

        def serve(function: Any = None, **settings: Any) -> Any:
            server = Served(function or batched.dynamically(lambda items: items))
            ends.callback(server.stop)
            made: Any = batched.connect(server.address, **settings)
            ends.callback(made.shutdown, wait=False, cancel_futures=True)
            made.served = server
            return made

        yield serve
