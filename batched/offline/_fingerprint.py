"""Fingerprints of steps, by which a run knows that its progress file is of other functions.

A fingerprint is of meaning: the code or `version`, arguments, columns. Batch size, workers and the
like may change between runs. Two rules stand against each other: a change of meaning must be
noticed, and a run must never refuse itself when nothing was changed. So what counts is what is the
same in every process.

- Functions and classes count by their source as a syntax tree, without comments, formatting,
  docstrings and decorators of functions, so that the hash is the same with every Python. What has
  no source (typed at a prompt, `exec`) counts by its bytecode, which another Python changes;
  what is compiled, by its name.
- Defaults and closures count by value where the value cannot change: numbers, text, bytes, dates,
  paths, tuples and frozen sets of these, functions, classes. A list or dict there may be state that
  the function itself changes; of it and of any other object the type counts.
- Arguments of a step and of `functools.partial` count by value, with lists, dicts, sets, arrays and
  dataclasses too. They are kept as hashes: one may be a password.
- A function that has a text `meaning` counts by that.
- What a function calls does not count, neither do globals, nor the state of an instance whose
  method or `__call__` is the function. `version=` stands for all of that, and for the code.
- Base classes of the same module count as code, others by their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import dis
import enum
import functools
import hashlib
import json
import re
import types
import uuid
from collections.abc import Mapping
from decimal import Decimal
from pathlib import PurePath
from typing import Any

from ._syntax import class_trees, describe_tree, function_tree

__all__ = ["code_hash", "difference", "fingerprint"]


def fingerprint(step: Any) -> dict[str, Any]:
    """The meaning of a step, as JSON values."""
    functions = ("preprocess", "postprocess", "route")
    if step.version is None:
        meaning = getattr(step.fn, "meaning", None)
        code: dict[str, str | None] = {
            "code": meaning if isinstance(meaning, str) else code_hash(step.fn)
        }
        code |= {name: _code_or_none(getattr(step, name)) for name in functions}
    else:
        code = {"version": str(step.version)}
    return {
        "name": step.name,
        **code,
        "args": [_digest(_describe(value)) for value in step.args],
        "kwargs": {
            str(name): _digest(_describe(value)) for name, value in (step.kwargs or {}).items()
        },
        "input": list(step.input),
        "output": list(step.output),
    }


def _code_or_none(func: Any) -> str | None:
    return None if func is None else code_hash(func)


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first thing in which two fingerprints differ, for a message; None if they are equal."""
    if old == new:
        return None
    step = f"step {new['name']!r}"
    if old["name"] != new["name"]:
        return f"{step} was {old['name']!r} before"
    for field, what in (("input", "input columns were"), ("output", "output columns were")):
        if old[field] != new[field]:
            return f"{step}: its {what} {old[field]}, and are {new[field]}"
    if old.get("version") != new.get("version"):
        before, now = (one.get("version") for one in (old, new))
        return f"{step}: its version was {before!r}, and is {now!r}"
    for field, what in (("args", "argument"), ("kwargs", "keyword argument")):
        if old[field] != new[field]:
            return f"{step}: its {what} {_first_difference(old[field], new[field])} differs"
    for field in ("code", "preprocess", "postprocess", "route"):
        if old.get(field) != new.get(field):
            whose = "its code" if field == "code" else f"the code of its {field}"
            return f"{step}: {whose} differs (version= says when a change of code matters)"
    return f"{step}: its fingerprint is of another version of this library"


def _first_difference(old: Any, new: Any) -> str:
    if isinstance(new, list):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return repr(names[0])


def code_hash(func: Any) -> str:
    """A hash of what a function or class does, the same in every process and with every Python."""
    return _digest(_describe_code(func, ()))


def _digest(description: Any) -> str:
    return hashlib.sha256(_text(description).encode()).hexdigest()[:32]


# Descriptions are JSON values. `seen` has the ids of what is being described: a function may have
# itself in its closure.

_Seen = tuple[int, ...]


def _describe(value: Any, seen: _Seen = (), *, fixed: bool = False) -> Any:
    """A value as JSON: of an object that may have state, the type alone; if `fixed`, the same of
    lists and whatever else can be changed in place.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if id(value) in seen:
        return "itself"
    kind = _name(type(value))
    if isinstance(value, enum.Enum):
        return [kind, value.name]
    if isinstance(value, str):
        return [kind, str.__str__(value)]
    if isinstance(value, int):
        return [kind, int.__repr__(value)]
    if isinstance(value, float):
        return [kind, float.__repr__(value)]
    if isinstance(value, re.Pattern):
        return [kind, _describe(value.pattern), value.flags]
    if isinstance(value, bytes | complex | range):
        return [kind, ascii(value)]
    if isinstance(value, _TEXTUAL):
        return [kind, str(value)]
    if isinstance(value, types.ModuleType):
        return [kind, value.__name__]
    if isinstance(value, _CODE):
        return _describe_code(value, seen)
    inner = (*seen, id(value))
    if _is_frozen(value) or (dataclasses.is_dataclass(value) and not fixed):
        names = [field.name for field in dataclasses.fields(value)]
        return [
            kind,
            [[name, _describe(getattr(value, name), inner, fixed=fixed)] for name in names],
        ]
    if isinstance(value, tuple) or (isinstance(value, list) and not fixed):
        return [kind, [_describe(part, inner, fixed=fixed) for part in value]]
    if isinstance(value, frozenset) or (isinstance(value, set) and not fixed):
        return [kind, sorted(_text(_describe(part, inner, fixed=fixed)) for part in value)]
    if not fixed and isinstance(value, dict):
        entries = [(_describe(key, inner), _describe(part, inner)) for key, part in value.items()]
        return [kind, sorted(map(_text, entries))]
    return [kind, *_describe_array(value, fixed)]


def _describe_array(value: Any, fixed: bool) -> list[Any]:
    """Type, shape and content of an array or a scalar of numpy."""
    # an array of objects holds addresses
    is_plain = not getattr(getattr(value, "dtype", None), "hasobject", True)
    if not is_plain or (fixed and value.shape != ()):
        return []
    content = hashlib.sha256(value.tobytes()).hexdigest()
    return [str(value.dtype), list(value.shape), content]


_TEXTUAL = (Decimal, dt.date, dt.time, dt.timedelta, uuid.UUID, PurePath)
"""Types whose text is all there is to a value, and the same in every process."""

_CODE = (
    type,
    functools.partial,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
)


def _is_frozen(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _name(thing: Any) -> str:
    # without its module, which is __main__ or not, by how a script is started
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def _text(description: Any) -> str:
    return json.dumps(description, sort_keys=True)


def _describe_code(func: Any, seen: _Seen) -> Any:
    if id(func) in seen:
        return "itself"
    seen = (*seen, id(func))
    if isinstance(func, functools.partial):
        args = [_describe(value, seen) for value in func.args]
        keywords = {name: _describe(value, seen) for name, value in func.keywords.items()}
        return ["partial", _describe_code(func.func, seen), args, keywords]
    if isinstance(func, types.MethodType):
        return ["method", _describe_code(func.__func__, seen), _describe_owner(func.__self__, seen)]
    if isinstance(func, type):
        return _describe_class(func, seen)
    wrapped = getattr(func, "__wrapped__", None)
    if isinstance(func, types.FunctionType):
        if wrapped is None:
            return _describe_function(func, seen)
        # a decorator: its name and its own settings, since its code is mostly somebody else's
        closure = _describe_values(func, seen, without=wrapped)
        return [func.__code__.co_qualname, closure, _describe_code(wrapped, seen)]
    if callable(wrapped):  # a batched function, or one with a cache
        return _describe_code(wrapped, seen)
    if isinstance(type(func).__call__, types.FunctionType):
        return ["instance", _describe_class(type(func), seen), _describe_owner(func, seen)]
    return [getattr(func, "__module__", None), _name(func)]  # compiled


def _describe_owner(instance: Any, seen: _Seen) -> Any:
    if _is_frozen(instance):
        return _describe(instance, tuple(one for one in seen if one != id(instance)))
    return _name(instance if isinstance(instance, type) else type(instance))


def _describe_function(func: types.FunctionType, seen: _Seen) -> Any:
    tree = function_tree(func.__code__)
    code = _describe_bytecode(func.__code__) if tree is None else describe_tree(tree)
    return [code, _describe_values(func, seen)]


def _describe_values(func: types.FunctionType, seen: _Seen, without: Any = None) -> Any:
    """Defaults, and variables of enclosing functions, but for those that the function rebinds."""
    code = func.__code__
    state = {"__class__"} | {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    values = dict(enumerate(func.__defaults__ or ())) | (func.__kwdefaults__ or {})
    for name, cell in zip(code.co_freevars, func.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not bound yet
            if name not in state and cell.cell_contents is not without:
                values[name] = cell.cell_contents
    return {str(name): _describe(value, seen, fixed=True) for name, value in values.items()}


def _describe_class(cls: type, seen: _Seen) -> Any:
    seen = (*seen, id(cls))
    own = [
        value
        for _, value in sorted(vars(cls).items())
        if isinstance(value, types.FunctionType)
        if value.__code__.co_qualname == f"{cls.__qualname__}.{value.__code__.co_name}"
    ]
    trees = class_trees(cls.__qualname__, own[0].__code__.co_filename) if own else []
    if trees:
        body = [list(map(describe_tree, trees)), [_describe_values(one, seen) for one in own]]
    else:
        body = [
            [name, _describe(getattr(value, "__wrapped__", value), seen, fixed=True)]
            for name, value in sorted(vars(cls).items())
            if not name.startswith("__") or isinstance(value, types.FunctionType)
        ]
    bases = [
        _describe_class(base, seen)
        if base.__module__ == cls.__module__ != "builtins"
        else f"{base.__module__}.{base.__qualname__}"
        for base in cls.__bases__
    ]
    return [cls.__qualname__, body, bases]


def _describe_bytecode(code: types.CodeType) -> Any:
    constants = [
        _describe_bytecode(value) if isinstance(value, types.CodeType) else _describe(value)
        for value in code.co_consts
    ]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]
