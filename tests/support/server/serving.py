"""A uvicorn in a process of its own, its output, and its clients."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

BOUND = 60.0
"""Seconds after which a wait counts as a hang; a server may load a model first."""
TESTS = Path(__file__).parents[1]


class Output:
    """Lines that a process writes, read in a thread."""

    def __init__(self, stream: IO[str]) -> None:
        self._heard = threading.Condition()  # guards the fields below
        self._lines: list[str] = []
        self._ended = False
        # daemon: a forked child may hold the stream open for ever
        self._reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in chain(stream, [None]):
                with self._heard:
                    if line is None:
                        self._ended = True
                    else:
                        self._lines.append(line)
                    self._heard.notify_all()

    def hear(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Return matches of the first `times` lines that match, once they are there."""

        def found() -> list[re.Match[str]]:
            return [match for line in self._lines if (match := re.search(pattern, line))]

        with self._heard:
            self._heard.wait_for(lambda: self._ended or len(found()) >= times, BOUND)
            assert len(found()) >= times, f"no {pattern!r} in: {''.join(self._lines)}"
            return found()[:times]

    def all(self) -> list[str]:
        """Return all lines, once the process has closed its output."""
        self._reader.join(BOUND)
        return self.so_far()

    def so_far(self) -> list[str]:
        with self._heard:
            return list(self._lines)


class Server:
    """`app` under uvicorn, in a process of its own."""

    def __init__(self, app: str, *arguments: str, environment: Mapping[str, str]) -> None:
        address = ["--app-dir", str(TESTS), "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", app, *address, "--no-access-log", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.output = Output(self.process.stdout)
        self.log = Output(self.process.stderr)

    @property
    def complaints(self) -> list[str]:
        """Lines of the log above the level INFO, from the first request on."""
        said = self.log.so_far()
        start = next(number for number, line in enumerate(said) if "running on" in line)
        return [line for line in said[start:] if not line.startswith("INFO:")]

    def client(self) -> Any:
        import httpx

        (address,) = self.log.hear(r"running on (\S+)")
        return httpx.AsyncClient(
            base_url=address[1],
            timeout=BOUND,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    def last_words(self) -> list[str]:
        """Return the lines of the output, once the process has ended."""
        self.process.wait(BOUND)
        return self.output.all()

    def kill(self) -> None:
        """End the process and its children, which would hold its streams open."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.all()
        self.log.all()


@contextmanager
def running(app: str, *arguments: str, **environment: str) -> Iterator[Server]:
    server = Server(app, *arguments, environment=environment)
    try:
        yield server
    finally:
        server.kill()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[Any]:
    """Serve `app` on this event loop, and yield a client of it."""
    import httpx
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        serving = asyncio.create_task(server.serve([listening]))
        address = "http://{}:{}".format(*listening.getsockname())
        async with httpx.AsyncClient(base_url=address, timeout=BOUND, trust_env=False) as client:
            yield client
        server.should_exit = True
        await asyncio.wait_for(serving, BOUND)
