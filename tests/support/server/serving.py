"""A uvicorn in a process of its own, its output, and its clients."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BOUND = 60.0
"""Seconds after which a wait counts as a hang; a server may load a model first."""
TESTS = Path(__file__).parents[1]


class Output:
    """Lines that a process writes to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def so_far(self) -> list[str]:
        written = os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0)
        return [f"{line}\n" for line in written.decode(errors="replace").split("\n")[:-1]]

    def hear(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Return matches of the first `times` lines that match, once they are there."""
        end = time.monotonic() + BOUND
        while True:
            found = [match for line in self.so_far() if (match := re.search(pattern, line))]
            if len(found) >= times:
                return found[:times]
            assert time.monotonic() < end, f"no {pattern!r} in: {''.join(self.so_far())}"
            time.sleep(0.01)


@dataclass
class Server:
    """An app under uvicorn, in a process of its own."""

    process: subprocess.Popen[bytes]
    output: Output
    log: Output

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
        self.process.wait(BOUND)
        return self.output.so_far()


@contextmanager
def running(app: str, *arguments: str, **environment: str) -> Iterator[Server]:
    """Serve `app`, and end the process and its children."""
    address = ["--app-dir", str(TESTS), "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", app, *address, "--no-access-log", *arguments],
            stdout=output,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            yield Server(process, Output(output), Output(log))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
