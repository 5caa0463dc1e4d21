"""Items of a file: texts, JSON values, or features."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..reference import argument_error


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


def to_features(values: Mapping[int, Any], sample: Path) -> list[dict[str, Any]]:
    """Return features of one row, without axis 0, for each value.

    Features are tensors if the user's module has imported torch, else arrays. A feature with a
    fraction in any row is float32 in all rows, because some files have 1 for 1.0.
    """
    rows = []
    first, *_ = values.values()
    for number, value in values.items():
        if not isinstance(value, dict) or not value or value.keys() != first.keys():
            wanted = f" {', '.join(first)}, as the first line" if value is not first else ""
            raise argument_error(f"{sample}, line {number}: must be an object of features{wanted}")
        try:
            row = {name: np.asarray(given) for name, given in value.items()}
        except ValueError:  # lists of different lengths
            row = {}
        if not row or any(array.dtype.kind not in "biuf" for array in row.values()):
            raise argument_error(
                f"{sample}, line {number}: each feature must be a number or lists of numbers"
            )
        rows.append(row)
    fractions = {name for row in rows for name in row if row[name].dtype.kind == "f"}
    torch = sys.modules.get("torch")
    to_tensor = np.asarray if torch is None else torch.from_numpy
    return [
        {
            name: to_tensor(array.astype(np.float32) if name in fractions else array)
            for name, array in row.items()
        }
        for row in rows
    ]
