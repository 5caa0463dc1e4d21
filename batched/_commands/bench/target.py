"""Target of the measurements: a batch function that the user names, and items from a file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from ... import AsyncBatched, Batched, BatchedError, BatchedInference, BatchedMethod
from ..._function.function import BatchFunction
from ..._function.inference import AsyncBatchedInference
from ..._function.settings import Options
from ..reference import argument_error, describe, first_line, import_attribute

AnyBatched = Batched[Any, Any, ...] | AsyncBatched[Any, Any, ...]

SEED = 0
"""Seed of the order of the items: a file sorted by length would have small batches of short items
only.
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """Batched function, and the items that callers pass to it."""

    reference: str
    """Name that the user gave: `module:function`."""
    batched: AnyBatched
    decorated: bool
    """True if the user has decorated it."""
    items: list[Any]
    """Items, or features of one row each, without axis 0."""

    @property
    def name(self) -> str:
        """Name of the function, without its module."""
        return self.reference.partition(":")[2]

    @property
    def takes_features(self) -> bool:
        return isinstance(self.batched, (BatchedInference, AsyncBatchedInference))

    def batches(self, size: int) -> Iterator[Any]:
        """Arguments for list calls of that many items, without end."""
        items = cycle(self.items)
        while True:
            batch = list(islice(items, size))
            yield (
                {name: [row[name] for row in batch] for name in batch[0]}
                if self.takes_features
                else batch
            )

    def arguments(self) -> list[Any]:
        """Arguments for calls of one item, for each item: of features [1, ...]."""
        if self.takes_features:
            return [{name: row[None] for name, row in item.items()} for item in self.items]
        # a list itself would be many items
        return [[item] if isinstance(item, list) else item for item in self.items]

    @contextlib.contextmanager
    def report_errors(self, when: str) -> Iterator[None]:
        """Context in which an error of the function is one of the command line.

        Raises:
            argparse.ArgumentError: in one sentence, what was raised, and `when`.
        """
        try:
            yield
        except BatchedError as error:  # whose message names the function
            raise argument_error(first_line(error)) from error
        except Exception as error:
            raise argument_error(f"{self.name} raised {describe(error)}, {when}") from error

    def suggestion(self, batch_size: int) -> str:
        """Line that says what to write into the source."""
        if batch_size == 1:
            return "It needs no decorator."
        if self.decorated:
            now = self.batched.options["batch_size"]
            return f"In its decorator: batch_size={batch_size} (now {now})"
        where = "batched.aio" if isinstance(self.batched, AsyncBatched) else "batched"
        return f"Decorator: @{where}.dynamically(batch_size={batch_size})"


def load_target(reference: str, sample: Path) -> Target:
    """Function `module:function`, imported as `python -m` would, and the items of a JSON file.

    Raises:
        argparse.ArgumentError: one of them is not there or cannot be used.
    """
    values = _read_json_lines(sample)
    found = import_attribute(reference)
    decorated = isinstance(found, (Batched, AsyncBatched))
    if decorated:
        batched: AnyBatched = found
    else:
        if isinstance(found, BatchedMethod):
            raise argument_error(
                f"{reference} is a method; name that of an instance, "
                "such as module:instance.method",
            )
        try:
            function = BatchFunction.of(found, Options(), coroutines=True)
            batched = (AsyncBatched if function.coroutine else Batched)(function)
        except TypeError as error:
            raise argument_error(
                f"cannot batch {reference}: {str(error).partition(';')[0]}"
            ) from error
    made = Target(reference, batched, decorated, [value for _, value in values])
    items = _to_features(values, sample) if made.takes_features else made.items
    return dataclasses.replace(made, items=random.Random(SEED).sample(items, len(items)))


def _read_json_lines(sample: Path) -> list[tuple[int, Any]]:
    """Values of a JSON Lines file, each with the number of its line."""
    try:
        text = sample.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise argument_error(f"cannot read {sample}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argument_error(f"cannot read {sample}: it is not UTF-8 text") from error
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                values.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise argument_error(
                f"{sample}, line {number}: not JSON: {error.msg} at column {error.colno}"
            ) from error
    if not values:
        raise argument_error(
            f"{sample} is empty; it must have one JSON value per line, each an item"
        )
    return values


def _to_features(values: list[tuple[int, Any]], sample: Path) -> list[dict[str, Any]]:
    """Values as features of one row, without axis 0: tensors if the user's module has imported
    torch, else arrays.

    A feature with a fraction anywhere is float32 everywhere, as models have it and because some
    write 1.0 as 1.
    """
    items = []
    first, names = next(
        ((number, list(value)) for number, value in values if isinstance(value, dict) and value),
        (0, []),
    )
    for number, value in values:
        if not isinstance(value, dict) or not value or set(value) != set(names):
            wanted = f"the features {', '.join(names)}, as line {first} is" if names else "features"
            raise argument_error(f"{sample}, line {number}: must be an object of {wanted}")
        rows: dict[str, Any] = {}
        for name in names:
            try:
                array = np.asarray(value[name])
            except ValueError:  # lists of different lengths
                array = np.asarray(None)
            if array.dtype.kind not in "biuf":
                raise argument_error(
                    f"{sample}, line {number}: {name} must be a number or lists of numbers"
                )
            rows[name] = array
        items.append(rows)
    fractions = {name for rows in items for name, array in rows.items() if array.dtype.kind == "f"}
    torch = sys.modules.get("torch")
    for rows in items:
        for name, array in rows.items():
            array = array.astype(np.float32) if name in fractions else array
            rows[name] = array if torch is None else torch.from_numpy(array)
    return items
