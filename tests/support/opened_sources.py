"""Sources that a test opens, and their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batched.offline.sources.base import Source
from batched.offline.sources.opening import open_source

Open = Callable[[Any], Source]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open a source; at the end of the test it is closed, and must leave no spool."""
    sources: list[Source] = []

    def open_it(source: Any) -> Source:
        sources.append(open_source(source, spool=tmp_path / f"spool{len(sources)}"))
        return sources[-1]

    yield open_it
    for source in sources:
        source.close()
    assert not list(tmp_path.glob("spool*"))


def rows_of(
    source: Source, columns: list[str] | None = None, size: int = 2048, **options: Any
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for window in source.windows(columns, size, **options):
        assert window.first == len(rows)
        assert 0 < window.size <= size
        values = {name: window.values(name) for name in window.columns}
        rows += [{name: values[name][place] for name in values} for place in range(window.size)]
    return rows


def column(source: Source, name: str = "id") -> list[Any]:
    """Return the values of one column."""
    return [row[name] for row in rows_of(source, [name], 7)]
