"""Coverage is measured in the tests of some packages only; the other tests of offline runs take
half the time without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Final

import pytest

MEASURED: Final = ("types", "identity", "run", "watch")
"""Folders of tests that reach every branch of their package."""


@pytest.fixture(autouse=True)
def unmeasured_threads_and_programs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if request.path.parent.name in MEASURED:
        yield
        return
    request.getfixturevalue("unmeasured")
    for name in [name for name in os.environ if name.startswith("COV")]:
        monkeypatch.delenv(name)
    tracer = threading.gettrace()
    threading.settrace(None)
    yield
    threading.settrace(tracer)
