"""Target of the measurements: a batch function that the user names, and items from a file."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from ... import AsyncBatched, Batched, BatchedError, BatchedMethod
from ..._function.batched import BatchedCallable, parts_of
from ..._function.function import BatchFunction
from ..._function.settings import Options
from ..reference import argument_error, describe, import_attribute

SEED = 0
"""Seed of the order of the items. In the order of a file sorted by length, small batches would have
short items only.
"""


@dataclass(frozen=True)
class Target:
    """Batched function, and the items that callers pass to it."""

    reference: str
    """Name that the user gave: `module:function`."""
    batched: BatchedCallable[Any, Any, ...]
    decorated: bool
    """True if the user has decorated it."""
    items: list[Any]
    """Items, or features of one row each, without axis 0."""

    @property
    def takes_features(self) -> bool:
        """True if the function takes features, not items."""
        return self.batched._function.options.features is not None

    def batches(self, size: int) -> Iterator[Any]:
        """Yield arguments for calls of `size` items, without end."""
        items = cycle(self.items)
        while True:
            batch = list(islice(items, size))
            yield (
                {name: [row[name] for row in batch] for name in batch[0]}
                if self.takes_features
                else batch
            )

    def arguments(self) -> list[Any]:
        """Return arguments for calls of one item, for each item: of features [1, ...]."""
        if self.takes_features:
            return [{name: row[None] for name, row in item.items()} for item in self.items]
        # a list itself would be many items
        return [[item] if isinstance(item, list) else item for item in self.items]

    @contextlib.contextmanager
    def report_errors(self, when: str) -> Iterator[None]:
        """Raise an error of the function as an error of the command line, with the time `when`."""
        try:
            yield
        except BatchedError:  # its message names the function
            raise
        except Exception as error:
            raise argument_error(f"{self.reference} raised {describe(error)}, {when}") from error

    def suggestion(self, batch_size: int) -> str:
        """Return the line to write into the source."""
        if batch_size == 1:
            return "It needs no decorator."
        if self.decorated:
            now = self.batched.options["batch_size"]
            return f"In its decorator: batch_size={batch_size} (now {now})"
        where = "batched.aio" if isinstance(self.batched, AsyncBatched) else "batched"
        return f"Decorator: @{where}.dynamically(batch_size={batch_size})"


def load_target(reference: str, sample: Path) -> Target:
    """Return the function `module:function`, and the items of a JSON Lines file.

    Raises:
        argparse.ArgumentError: the function does not exist, or it or the file cannot be used.
        OSError: the file cannot be read.
    """
    values = _read_json_lines(sample)
    found = import_attribute(reference)
    decorated = isinstance(found, BatchedCallable)
    if isinstance(found, BatchedMethod):
        raise argument_error(
            f"{reference} is a method; name the method of an instance, as module:instance.method"
        )
    if decorated and parts_of(found).execution.in_steps:
        raise argument_error(f"{reference} works in steps; bench measures functions of lists")
    if not decorated:
        try:
            function = BatchFunction.of(found, Options(), coroutines=True)
        except TypeError as error:
            reason = str(error).partition(";")[0]
            raise argument_error(f"cannot batch {reference}: {reason}") from error
        found = (AsyncBatched if function.coroutine else Batched)(function)
    target = Target(reference, found, decorated, list(values.values()))
    if target.takes_features:
        target.items[:] = _to_features(values, sample)
    random.Random(SEED).shuffle(target.items)
    return target


def _read_json_lines(sample: Path) -> dict[int, Any]:
    """Return the values of a JSON Lines file by number of the line."""
    values = {}
    for number, line in enumerate(sample.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                values[number] = json.loads(line)
            except ValueError as error:  # or no text at all
                why = getattr(error, "msg", error)
                raise argument_error(f"{sample}, line {number}: not JSON: {why}") from error
    if not values:
        raise argument_error(
            f"{sample} is empty; it must have one JSON value per line, each an item"
        )
    return values


def _to_features(values: Mapping[int, Any], sample: Path) -> list[dict[str, Any]]:
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
