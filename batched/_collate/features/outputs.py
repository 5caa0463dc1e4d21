"""Outputs of batch functions as trees: containers, nested as deep as it goes, whose leaves are
arrays or tensors with one row per item.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import BatchFunctionError
from ..arrays import Array, is_array, is_dense
from ..collator import UNAWAITED, is_unawaited

Path = tuple[Any, ...]
"""Keys, positions and names of dataclass fields that lead from an output to one of its leaves."""


def tree_flatten(output: Any) -> list[tuple[Path, Array]]:
    """Leaves of `output`, each with its path, in the order that `tree_unflatten` takes them.

    Raises:
        BatchFunctionError: there is something in it that has no rows; or there is nothing.
    """
    found = list(_iter_leaves(output, ()))
    if not found:
        raise BatchFunctionError(
            f"the output is {type(output).__name__} and holds no array or "
            "tensor; it must have one row per item"
        )
    return found


def tree_unflatten(output: Any, arrays: Iterator[Array]) -> Any:
    """Tree like `output`, with the next of `arrays` in the place of each of its leaves."""
    kind = type(output)
    if output is None:
        return None
    if is_array(output):
        return next(arrays)
    children = _children(output) or ()
    parts = {key: tree_unflatten(value, arrays) for key, value in children}
    if isinstance(output, Mapping):
        return parts if kind is dict else _mapping_like(output, parts)
    if isinstance(output, (list, tuple)):
        sequence = list(parts.values())
        return kind._make(sequence) if hasattr(kind, "_make") else kind(sequence)
    # a dataclass: its constructor may take other arguments than it has fields
    twin = object.__new__(kind)
    for name, value in getattr(output, "__dict__", {}).items():
        # an array beside the fields, such as a cached property, is of the whole batch
        if next(_iter_arrays(value), None) is None:
            twin.__dict__[name] = value
    for name, part in parts.items():
        object.__setattr__(twin, name, part)
    return twin


def dotted_path(path: Path) -> str:
    """Path as messages and the setting `unpad` have it: `hidden_states.3`; empty for an output that
    is itself an array.
    """
    return ".".join(map(str, path))


def describe(path: Path) -> str:
    """Phrase for the place of a leaf, for a message."""
    return f"{dotted_path(path)!r} in the output" if path else "the output"


def _iter_leaves(output: Any, path: Path) -> Iterator[tuple[Path, Array]]:
    if output is None:
        return
    if is_array(output):
        if not output.ndim:
            raise BatchFunctionError(
                f"{describe(path)} is a single value and cannot be split; it "
                "must have one row per item"
            )
        if not is_dense(output):
            raise BatchFunctionError(
                f"{describe(path)} is a "
                f"{'nested tensor' if output.is_nested else f'tensor of layout {output.layout}'}, "
                "which cannot be "
                "split into rows; return a dense one"
            )
        yield path, output
    elif (children := _children(output)) is not None:
        for key, value in children:
            yield from _iter_leaves(value, (*path, key))
    else:
        if is_unawaited(output):
            raise BatchFunctionError(f"{describe(path)} is {UNAWAITED}")
        kind = type(output).__name__
        hint = ""
        if kind.endswith("Cache"):
            hint = "; call the model with use_cache=False"
        elif path and isinstance(path[-1], int):
            hint = "; a list is several outputs, not rows: return an array or tensor, no tolist()"
        raise BatchFunctionError(
            f"{describe(path)} is of type {kind}, which cannot be split into rows{hint}"
        )


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a container; None of anything else."""
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, (list, tuple)):
        return list(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return None


def _iter_arrays(value: Any) -> Iterator[Array]:
    """Arrays in `value`, as far as mappings, lists and tuples hold them."""
    if is_array(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for _, child in _children(value) or ():
            yield from _iter_arrays(child)


def _mapping_like(output: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """`parts` in a mapping of the type of `output` if that is a kind of dict that can be copied and
    changed; in a dict otherwise.
    """
    if not isinstance(output, (dict, UserDict)):
        return parts
    try:
        twin: Any = copy.copy(output)
        for key, part in parts.items():
            twin[key] = part
    except TypeError:
        return parts
    own = {id(array) for array in _iter_arrays(parts)}
    for name, value in list(getattr(twin, "__dict__", {}).items()):
        if any(id(array) not in own for array in _iter_arrays(value)):  # of the whole batch
            del twin.__dict__[name]
    return twin
