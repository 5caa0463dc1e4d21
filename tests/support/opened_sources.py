"""Sources that a test opens, and their rows."""

from __future__ import annotations

import types
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
    return [row[name] for row in rows_of(source, [name], 7)]


class HubDataset:
    """As much of `datasets.Dataset` as is used. A form other than Arrow's is a transform."""

    def __init__(self, table: Any, form: str | None = None, columns: Any = None) -> None:
        self.table, self.form = table, form
        self.features = types.SimpleNamespace(arrow_schema=table.schema)
        self.column_names, self.num_rows = table.column_names, table.num_rows
        self.format = {"type": form, "columns": columns or table.column_names}

    def __len__(self) -> int:
        return int(self.num_rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.table.select(self.format["columns"]).to_pylist()[number]
        return {name: f"{self.form} {row[name]}" if self.form else row[name] for name in row}

    def with_format(self, form: str) -> HubDataset:
        return HubDataset(self.table, form)

    def select_columns(self, columns: list[str]) -> HubDataset:
        return HubDataset(self.table.select(columns), self.form)

    def iter(self, batch_size: int) -> Iterator[Any]:
        assert self.form == "arrow"
        for first in range(0, self.num_rows, batch_size):
            yield self.table.slice(first, batch_size)
