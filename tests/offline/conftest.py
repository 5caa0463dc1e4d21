"""Coverage is of the core, of the execution of batches and of the runtimes, which have tests of
their own; without it these here take half the time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def unmeasured_threads_and_programs(
    unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("COV")]:
        monkeypatch.delenv(name)
    tracer = threading.gettrace()
    threading.settrace(None)
    yield
    threading.settrace(tracer)
