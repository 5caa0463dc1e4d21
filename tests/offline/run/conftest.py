"""Server of trials."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trials import Trials, trials


@pytest.fixture(scope="module")
def server() -> Iterator[Trials]:
    with trials() as server:
        yield server
