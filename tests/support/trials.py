"""Trials: offline runs in processes of their own, which may be killed at any moment.

A server, which has imported everything once, forks a child for each trial: a trial costs some tens
of milliseconds. The child calls one function of `trial_runs.py` and reports its end through a pipe.
`python trials.py` is the server; jobs come as lines of JSON on its input, answers on its output.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import faults
from faults import Fault

LIMIT_S: Final = 60.0
"""Time after which a trial counts as hung (s)."""


@dataclass(frozen=True)
class Ended:
    """The end of a trial."""

    how: Literal["done", "raised", "killed", "hung"]
    result: Any = None
    """What the function returned."""
    error: str = ""
    """Type and text of the exception that it raised."""
    kinds: Sequence[str] = ()
    """Names of that type and of its bases."""
    lines: str = ""
    """Lines of the traceback."""
    changes: int = 0
    """Changes below the folder of the fault, if the process lived to tell."""
    seconds: float = 0.0


class Trials:
    """A server of trials."""

    def __init__(self, preload: Path | None = None) -> None:
        """Start a server; `preload` is the library of faults."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._session = 0

    def run(
        self,
        function: str,
        *,
        fault: Fault | None = None,
        kill_after_s: float | None = None,
        **arguments: Any,
    ) -> Ended:
        """Call a function of `trial_runs.py` in a process of its own, and return its end."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        job = {
            "function": function,
            "arguments": arguments,
            "fault": None if fault is None else asdict(fault),
            "kill_after_s": kill_after_s,
        }
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "the server of trials has died"
        answer = json.loads(line)
        self._session = answer.pop("session")
        return Ended(**answer)

    def leftovers(self) -> list[str]:
        """Return the commands of processes that the last trial has started and left."""
        return processes_of(self._session)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)
        self._process.stdout.close()


@contextmanager
def trials(preload: Path | None = None) -> Iterator[Trials]:
    """Start a server of trials, and end it."""
    with closing(Trials(preload)) as server:
        yield server


def processes_of(session: int) -> list[str]:
    """Return the commands of the processes of a session that still live."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has just ended
            continue
    return found


# --- the server


def _serve() -> None:
    functions = importlib.import_module("trial_runs")
    warm = False
    for line in sys.stdin:
        job = json.loads(line)
        answer = _attempt(functions, job)
        modules = answer.pop("modules", ())
        if not warm and answer["how"] == "done":
            # modules that a run imports late are imported here, once for all further children
            warm = True
            for name in modules:
                with suppress(Exception):  # a module of the child's own making
                    importlib.import_module(name)
        print(json.dumps(answer), flush=True)


def _attempt(functions: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for `job`, and return its end; kill it when it is time."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _child(getattr(functions, job["function"]), job, writing)
    os.close(writing)
    data, late = _read_until(reading, job["kill_after_s"] or LIMIT_S)
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reading)
    if data and not late:
        answer = json.loads(data)
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        answer = {"how": "hung" if late and not job["kill_after_s"] else "killed"}
    else:
        answer = {"how": "raised", "error": f"the process ended with wait status {status}"}
    return {**answer, "session": pid, "seconds": time.perf_counter() - began}


def _read_until(descriptor: int, seconds: float) -> tuple[bytes, bool]:
    """Read to the end of a pipe; True if that did not come in time."""
    deadline = time.monotonic() + seconds
    data = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return data, True
        part = os.read(descriptor, 1 << 16)
        if not part:
            return data, False
        data += part


def _child(function: Callable[..., Any], job: dict[str, Any], writing: int) -> None:
    """Call the function, tell its end, and leave."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    fault = job["fault"]
    answer: dict[str, Any]
    try:
        if fault is not None:
            faults.arm(Fault(**fault))
        answer = {"how": "done", "result": function(**job["arguments"])}
    except BaseException as error:
        answer = {
            "how": "raised",
            "error": f"{type(error).__name__}: {error}",
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "lines": traceback.format_exc(),
        }
    if fault is not None:
        answer["changes"] = faults.changes()
        faults.arm(Fault("", 0, "kill"))
    with os.fdopen(writing, "w") as pipe:
        json.dump({**answer, "modules": [*sys.modules]}, pipe)
    os._exit(0)


if __name__ == "__main__":
    _serve()
