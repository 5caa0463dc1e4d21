"""Items of a file: texts, or JSON values."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from .reference import argument_error


def read_items(sample: Path, column: str | None) -> dict[int, Any]:
    """Return the items of a file by number of the line.

    A line of a `.txt` file is an item, and a row of a `.csv` file has one in `column`. Every other
    file is JSON Lines, of which `column` takes one value of each object.

    Raises:
        argparse.ArgumentError: the file has no items, or a line of it is not as described.
        OSError: the file cannot be read.
    """
    try:
        text = sample.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise argument_error(f"{sample} is not a text in UTF-8: {error}") from error
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    values: dict[int, Any] = {}
    if sample.suffix == ".txt":
        values.update(lines)
    elif sample.suffix == ".csv":
        csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # no item is too long
        rows = csv.DictReader(io.StringIO(text))
        names = ", ".join(rows.fieldnames or ["no columns"])
        for row in rows:
            values[rows.line_num] = row
        if column is None:
            raise argument_error(f"{sample} has {names}; name the column of the items by --column")
    else:
        for number, line in lines.items():
            try:
                values[number] = json.loads(line)
            except ValueError as error:
                why = getattr(error, "msg", error)
                raise argument_error(f"{sample}, line {number}: not JSON: {why}") from error
    if not values:
        raise argument_error(f"{sample} has no items; each line must be one")
    if column is not None:
        values = {number: _take(sample, number, row, column) for number, row in values.items()}
    return values


def _take(sample: Path, number: int, row: Any, column: str) -> Any:
    """Return the value of one column of a row."""
    values = row if isinstance(row, dict) else {}
    if values.get(column) is None:
        names = ", ".join(name for name, value in values.items() if name and value is not None)
        raise argument_error(
            f"{sample}, line {number}: no column {column}; it has {names or 'no columns'}"
        )
    return values[column]
