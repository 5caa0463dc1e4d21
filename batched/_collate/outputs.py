"""Outputs of a batch function: arrays or tensors with one row per item, in whatever holds them,
nested as deep as it goes.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import BatchFunctionError
from .fields import Array

Path = tuple[Any, ...]
"""Keys, positions and names of fields that lead to an array in an output."""


def leaves(output: Any) -> list[tuple[Path, Array]]:
    """Every array in `output`, each with its path, in the order that `rebuilt` takes them.

    Raises:
        BatchFunctionError: there is something in it that has no rows; or there is nothing.
    """
    found = list(_leaves(output, ()))
    if not found:
        raise BatchFunctionError(
            f"the output is {type(output).__name__} and holds no array or "
            "tensor; it must have one row per item"
        )
    return found


def rebuilt(output: Any, arrays: Iterator[Array]) -> Any:
    """`output` with the next of `arrays` in the place of each of its own."""
    kind = type(output)
    if output is None:
        return None
    if is_array(output):
        return next(arrays)
    if isinstance(output, Mapping):
        parts = {key: rebuilt(value, arrays) for key, value in output.items()}
        return parts if kind is dict else _mapping_like(output, parts)
    if isinstance(output, (list, tuple)):
        sequence = [rebuilt(value, arrays) for value in output]
        return kind._make(sequence) if hasattr(kind, "_make") else kind(sequence)
    # a dataclass: its constructor may take other arguments than it has fields
    twin = object.__new__(kind)
    vars_of = getattr(output, "__dict__", None)
    # what has arrays beside the fields, such as a cached property, is of the whole batch
    if vars_of is not None:
        twin.__dict__.update(
            {name: value for name, value in vars_of.items() if next(_arrays(value), None) is None}
        )
    for field in dataclasses.fields(output):
        object.__setattr__(twin, field.name, rebuilt(getattr(output, field.name), arrays))
    return twin


def is_array(value: Any) -> bool:
    """Whether `value` is an array of numpy or a tensor of torch."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def is_scalar(value: Any) -> bool:
    """Whether `value` is a number of numpy, as rows of an array of one axis are."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_dense(array: Array) -> bool:
    """Whether rows of it are slices: of all arrays of numpy, and of tensors that are neither sparse
    nor nested.
    """
    return not hasattr(array, "layout") or (
        array.layout is sys.modules["torch"].strided and not array.is_nested
    )


def said(path: Path) -> str:
    """The path as messages and the setting `unpad` have it: `hidden_states.3`; empty for an output
    that is itself an array.
    """
    return ".".join(map(str, path))


def named(path: Path) -> str:
    """The path in a sentence."""
    return f"{said(path)!r} in the output" if path else "the output"


def _leaves(output: Any, path: Path) -> Iterator[tuple[Path, Array]]:
    if output is None:
        return
    if is_array(output):
        if not output.ndim:
            raise BatchFunctionError(
                f"{named(path)} is a single value and cannot be split; it "
                "must have one row per item"
            )
        if not is_dense(output):
            raise BatchFunctionError(
                f"{named(path)} is a "
                f"{'nested tensor' if output.is_nested else f'tensor of layout {output.layout}'}, "
                "which cannot be "
                "split into rows; return a dense one"
            )
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(output, (list, tuple)):
        for position, value in enumerate(output):
            yield from _leaves(value, (*path, position))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _leaves(getattr(output, field.name), (*path, field.name))
    else:
        kind = type(output).__name__
        hint = "; call the model with use_cache=False" if kind.endswith("Cache") else ""
        raise BatchFunctionError(
            f"{named(path)} is of type {kind}, which cannot be split into rows{hint}"
        )


def _arrays(value: Any) -> Iterator[Array]:
    """Every array in `value`, as far as built-in containers and mappings hold them."""
    if is_array(value):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays(each)


def _mapping_like(output: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """`parts` in a mapping of the type of `output`; in a dict, if that is one that cannot be
    changed.
    """
    kind = type(output)
    twin: Any
    try:
        if dataclasses.is_dataclass(kind):  # a ModelOutput of transformers
            names = {field.name for field in dataclasses.fields(kind)}
            twin = kind(**{name: part for name, part in parts.items() if name in names})
        else:
            twin = copy.copy(output)
            for name, value in getattr(twin, "__dict__", {}).items():
                # where it may keep its entries, which are not to be shared
                if isinstance(value, (dict, list, set)):
                    twin.__dict__[name] = copy.copy(value)
        for key, part in parts.items():
            whole = output[key]
            twin[key] = part
            if output[key] is not whole:  # they share what holds their entries
                twin[key] = whole
                return parts
    except TypeError:
        return parts
    own = {id(array) for array in _arrays(parts)}
    for name, value in list(getattr(twin, "__dict__", {}).items()):
        if any(id(array) not in own for array in _arrays(value)):  # of the whole batch
            del twin.__dict__[name]
    return twin
