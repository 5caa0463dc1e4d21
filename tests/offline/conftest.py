"""Server of trials, and what engines leave. Without pyarrow none of these tests is collected."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from stage import wait_until
from trials import Trials, trials

collect_ignore_glob = [] if importlib.util.find_spec("pyarrow") else ["*"]


@pytest.fixture(scope="module")
def server() -> Iterator[Trials]:
    with trials() as server:
        yield server


@pytest.fixture
def leftovers() -> Iterator[Callable[[], list[str]]]:
    """Tell threads and processes that engines have left. In the end there must be none."""
    from offline_steps import spawned_by  # needs pyarrow

    known = set(threading.enumerate())

    def found() -> list[str]:
        names = [each.name for each in set(threading.enumerate()) - known]
        names = [name for name in names if name.startswith("batched-")]
        return names + [f"process {pid}" for pid in spawned_by(os.getpid())]

    yield found
    wait_until(lambda: not found())
