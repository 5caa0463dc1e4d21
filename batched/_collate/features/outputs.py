"""Outputs of batch functions as trees of arrays with one row per item.

The nodes are mappings, lists, tuples, named tuples and dataclasses, nested to any depth. Dicts and
their subclasses keep their type and their entries, and dataclasses their fields. Other attributes
may have data of the whole batch, so they are left out. Any other mapping becomes a dict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...errors import BatchFunctionError
from ..arrays import Array, is_array, is_dense
from ..collator import refuse_unawaited

Path = tuple[Any, ...]
"""Keys, positions and names of dataclass fields that lead from an output to one of its leaves."""


def tree_flatten(output: Any) -> list[tuple[Path, Array]]:
    """Return the leaves of `output`, each with its path, in the order of `tree_unflatten`.

    Raises:
        BatchFunctionError: `output` has a leaf without rows, or no leaves.
    """
    found: list[tuple[Path, Array]] = []
    _add_leaves(found, output, ())
    if not found:
        raise BatchFunctionError(
            f"the output is {type(output).__name__} and holds no array or "
            "tensor; it must have one row per item"
        )
    return found


def tree_unflatten(output: Any, arrays: Iterator[Array]) -> Any:
    """Return a tree like `output` with the next of `arrays` in the place of each of its leaves."""
    kind: Any = type(output)
    if is_array(output):
        return next(arrays)
    parts = {key: tree_unflatten(value, arrays) for key, value in _list_children(output)}
    if isinstance(output, (list, tuple)):
        return getattr(kind, "_make", kind)(parts.values())
    if isinstance(output, Mapping) and not isinstance(output, dict):
        return parts
    # a constructor may take other arguments than there are entries or fields
    twin = kind.__new__(kind)
    put = kind.__setitem__ if isinstance(output, dict) else object.__setattr__
    for name, part in parts.items():
        put(twin, name, part)
    return twin


def dotted_path(path: Path) -> str:
    """Return a path as messages and the setting `unpad` have it: `hidden_states.3`.

    It is empty for an output that is itself an array.
    """
    return ".".join(map(str, path))


def describe(path: Path) -> str:
    """Return a phrase for the place of a leaf, for a message."""
    return f"{dotted_path(path)!r} in the output" if path else "the output"


def _add_leaves(found: list[tuple[Path, Array]], output: Any, path: Path) -> None:
    if is_array(output):
        if not is_dense(output) or not output.ndim:
            kind = "a single value" if is_dense(output) else "a sparse or nested tensor"
            raise BatchFunctionError(
                f"{describe(path)} is {kind}, which cannot be split into rows: return a dense "
                "array with one row per item"
            )
        found.append((path, output))
    else:
        for key, value in _list_children(output, path):
            _add_leaves(found, value, (*path, key))


def _list_children(node: Any, path: Path = ()) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a container, of which None is an empty one.

    Raises:
        BatchFunctionError: `node` is any other object.
    """
    if isinstance(node, Mapping):
        return node.items()
    if isinstance(node, (list, tuple)):
        return enumerate(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    if node is None:
        return ()
    refuse_unawaited(f"{describe(path)} is", node)
    raise BatchFunctionError(
        f"{describe(path)} is of type {type(node).__name__}, which cannot be split into rows "
        "(a list is several outputs, not rows: return an array or tensor, no tolist(); models "
        "return no cache if told use_cache=False)"
    )
