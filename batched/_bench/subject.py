"""What is measured: a batch function that the user names, and items from a file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from .. import AsyncBatched, Batched, BatchedError, BatchedInference, BatchedMethod
from .._batched_inference import AsyncBatchedInference
from .._batcher import BatchFunction, Options

Face = Batched[Any, Any, ...] | AsyncBatched[Any, Any, ...]

SEED = 0
"""Of the order of the items, which is the same each time: a file sorted by length would have small
batches of short items only.
"""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A batched function, and what callers pass to it."""

    target: str
    """As the user names it."""
    face: Face
    decorated: bool
    """Whether the user has decorated it."""
    items: list[Any]

    @property
    def name(self) -> str:
        """The function's, without its module."""
        return self.target.partition(":")[2]

    @property
    def takes_features(self) -> bool:
        return isinstance(self.face, (BatchedInference, AsyncBatchedInference))

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
        """One for each item, with which a call is a call of that item."""
        if self.takes_features:
            return [{name: row[None] for name, row in item.items()} for item in self.items]
        # a list itself would be many items
        return [[item] if isinstance(item, list) else item for item in self.items]

    @contextlib.contextmanager
    def blamed(self, when: str) -> Iterator[None]:
        """Makes what the function raises an argument that was wrong.

        Raises:
            argparse.ArgumentError: in one sentence, what was raised, and when.
        """
        try:
            yield
        except BatchedError as error:  # whose message names the function
            raise argparse.ArgumentError(None, _first_line(error)) from error
        except Exception as error:
            raise argparse.ArgumentError(
                None, f"{self.name} raised {_told(error)}, {when}"
            ) from error

    def paste(self, batch_size: int) -> str:
        """What is to be written into the source."""
        if batch_size == 1:
            return "It needs no decorator."
        if self.decorated:
            now = self.face._function.options.policy.batch_size
            return f"In its decorator: batch_size={batch_size} (now {now})"
        where = "batched.aio" if isinstance(self.face, AsyncBatched) else "batched"
        return f"Decorator: @{where}.dynamically(batch_size={batch_size})"


def subject(target: str, sample: Path) -> Subject:
    """The function `module:function`, imported as `python -m` would, with the items of a JSON Lines
    file.

    Raises:
        argparse.ArgumentError: one of them is not there or cannot be used.
    """
    values = _lines(sample)
    found = _found(target)
    decorated = isinstance(found, (Batched, AsyncBatched))
    if decorated:
        face: Face = found
    else:
        if isinstance(found, BatchedMethod):
            raise argparse.ArgumentError(
                None,
                f"{target} is a method; name that of an instance, such as module:instance.method",
            )
        try:
            function = BatchFunction.of(found, Options(), coroutines=True)
            face = (AsyncBatched if function.coroutine else Batched)(function)
        except TypeError as error:
            raise argparse.ArgumentError(
                None, f"cannot batch {target}: {str(error).partition(';')[0]}"
            ) from error
    made = Subject(target, face, decorated, [value for _, value in values])
    items = _features(values, sample) if made.takes_features else made.items
    return dataclasses.replace(made, items=random.Random(SEED).sample(items, len(items)))


def _lines(sample: Path) -> list[tuple[int, Any]]:
    """The values of a JSON Lines file, with the numbers of their lines."""
    try:
        text = sample.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise argparse.ArgumentError(None, f"cannot read {sample}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise argparse.ArgumentError(None, f"cannot read {sample}: it is not UTF-8 text") from error
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                values.append((number, json.loads(line)))
        except json.JSONDecodeError as error:
            raise argparse.ArgumentError(
                None, f"{sample}, line {number}: not JSON: {error.msg} at column {error.colno}"
            ) from error
    if not values:
        raise argparse.ArgumentError(
            None, f"{sample} is empty; it must have one JSON value per line, each an item"
        )
    return values


def _found(target: str) -> Any:
    """What `module:attribute` names."""
    if not re.fullmatch(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*", target):
        raise argparse.ArgumentError(None, f"name the function as module:function, got {target!r}")
    module, _, attributes = target.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever is wrong with the user's module
        reason = _first_line(error) if isinstance(error, ModuleNotFoundError) else _told(error)
        raise argparse.ArgumentError(None, f"cannot import {module}: {reason}") from error
    at = module
    for name in attributes.split("."):
        try:
            found, at = getattr(found, name), f"{at}.{name}"
        except AttributeError as error:
            raise argparse.ArgumentError(None, f"{at} has no attribute {name!r}") from error
    return found


def _features(values: list[tuple[int, Any]], sample: Path) -> list[dict[str, Any]]:
    """Each value as features of one row: tensors if the user's module has imported torch, else
    arrays.

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
            raise argparse.ArgumentError(
                None, f"{sample}, line {number}: must be an object of {wanted}"
            )
        rows: dict[str, Any] = {}
        for name in names:
            try:
                array = np.asarray(value[name])
            except ValueError:  # lists of different lengths
                array = np.asarray(None)
            if array.dtype.kind not in "biuf":
                raise argparse.ArgumentError(
                    None, f"{sample}, line {number}: {name} must be a number or lists of numbers"
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


def _told(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, _first_line(error))))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
