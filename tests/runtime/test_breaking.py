"""An interrupt at any moment within the library leaves no caller waiting. The next call is served,
and the batcher can be shut down.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support/breaking.py"
TIMEOUT = 240.0
"""Of a sweep over all moments (s); it takes a few seconds."""


SLOW = (
    "callers queue_timeout_ms=1e4",
    "loop",
    "callers on_full='raise'",
    "workers max_concurrent_batches=2 isolate_errors=True",
    "workers prefetch=1",
    "loop-coroutine max_concurrent_batches=2 isolate_errors=True queue_timeout_ms=1e4",
)


@pytest.mark.once  # of minutes on all of them
@pytest.mark.parametrize(
    "arguments",
    ["workers", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_nobody_is_left_waiting_wherever_something_breaks_in(arguments: str) -> None:
    # it is not to be measured along, which takes twice as long
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    *problems, moments = done.stdout.splitlines() or [""]
    assert (done.returncode, problems) == (0, []), done.stderr
    assert int(moments.removesuffix(" moments")) > 200
