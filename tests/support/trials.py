"""Trials: offline runs in processes of their own, which may be killed at any moment.

A server, which has imported everything once, forks a child for each trial: a trial costs some tens
of milliseconds. The child calls one function of `trial_runs.py` and leaves its end in a file.
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
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import faults
from faults import Fault

LIMIT_S: Final = 60.0
"""Time after which a trial counts as hung (s)."""


@dataclass(frozen=True)
class Ended:
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

    def __init__(self, process: Any) -> None:
        self._process = process
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
        known = None if fault is None else asdict(fault)
        job = {"function": function, "arguments": arguments, "fault": known, "after": kill_after_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())  # an error: the server has died
        self._session = answer.pop("session")
        return Ended(**answer)

    def leftovers(self) -> list[str]:
        """Return the commands of processes that the last trial has started and left."""
        found: list[str] = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self._session and fields[0] != "Z":
                    found.append((path / "cmdline").read_text().replace("\0", " "))
        return found


@contextmanager
def trials(preload: Path | None = None) -> Iterator[Trials]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    with subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        yield Trials(process)


# --- the server


def _serve() -> None:
    functions = importlib.import_module("trial_runs")
    warm = False
    for line in sys.stdin:
        answer = _attempt(functions, json.loads(line))
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
    began = time.perf_counter()
    ended, ends = os.pipe()  # the end of the child closes it
    with tempfile.TemporaryFile("w+") as file:
        pid = os.fork()
        if not pid:
            os.close(ended)
            _child(functions, job, file)
        os.close(ends)
        late = not select.select([ended], [], [], job["after"] or LIMIT_S)[0]
        if late:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(ended)
        file.seek(0)
        data = file.read()
    if data and os.WIFEXITED(status):
        answer = json.loads(data)
    elif os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        answer = {"how": "hung" if late and not job["after"] else "killed"}
    else:
        answer = {"how": "raised", "error": f"the process ended with wait status {status}"}
    return {**answer, "session": pid, "seconds": time.perf_counter() - began}


def _child(functions: Any, job: dict[str, Any], file: Any) -> None:
    """Call the function, leave its end in `file`, and end."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    fault = job["fault"]
    answer: dict[str, Any]
    try:
        if fault is not None:
            faults.arm(Fault(**fault))
        result = getattr(functions, job["function"])(**job["arguments"])
        answer = {"how": "done", "result": result}
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
    json.dump({**answer, "modules": [*sys.modules]}, file)
    file.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
