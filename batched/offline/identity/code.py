"""Fingerprints of steps, which tell a run whether its progress file belongs to other code.

A changed step must be noticed, and an unchanged step must never be refused. A fingerprint is the
same in every process, and with every Python where the source is at hand. A part of a step counts if
it is part of the fingerprint.

1. A function counts by its syntax tree, without comments, formatting and docstrings. The loaded
   bytecode counts instead if the file has no such code: it was edited since its import, or there
   is no file.
2. Code is followed through globals, closures, decorators and base classes. The module of the step's
   function and all modules that are not of installed packages count as code. Functions and classes
   of installed packages count by name.
3. A global counts by value if it is immutable: numbers, text, dates, paths, enum members, tuples,
   frozen dataclasses. Of a list, dict or set only the type counts, because it may be a cache. Of
   any other instance the class counts, and the state if the instance can be called.
4. A constant of an imported module counts like a global. Of a module that is not loaded yet, the
   whole source counts.
5. Defaults, closures, arguments, partials and the state of instances count by value, as `pickle`
   sees it. Variables and attributes that the code rebinds or changes do not count.
6. An instance of an installed class counts by its `state_dict()`, or by its attributes if they are
   data. A warning names each part that is not looked into or cannot be pickled.
7. An instance with a text `meaning` counts by that text.
8. `version=` stands for code and arguments. The name of a step does not count.
9. All but short globals are kept as hashes, because an argument may be a password.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.util
import inspect
import logging
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import PurePath
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from .syntax import describe_bytecode, describe_file, describe_tree, find_tree, scan

__all__ = ["difference", "fingerprint"]

_logger = logging.getLogger("batched")

_INSTALLED = {*sys.stdlib_module_names, __name__.partition(".")[0]}
_SECRET = re.compile("key|token|secret|pass|auth|cred", re.IGNORECASE)
_SHOWN = 40
"""Longest text of a global that messages show (characters)."""
_SILENT = ("_abc", "_thread", "threading")
"""Modules of types that change nothing in a result."""
_BUILDERS = ("__init__", "__post_init__", "__new__", "__setstate__")
"""Methods that make an instance; all other methods change it."""


def fingerprint(step: Any) -> dict[str, Any]:
    """Return the meaning of a step as JSON values.

    A warning of the logger `batched` names the parts in which a change is not noticed.
    """
    reader = _Reader(step.fn)
    if step.version is None:
        reader.add("its code", step.fn)
        for name in ("preprocess", "postprocess", "where", "route"):
            reader.add(f"its {name}", getattr(step, name, None))
        arguments = {**dict(enumerate(step.args)), **step.kwargs}
        for place, value in arguments.items():
            reader.add(f"its argument {place!r}", value)
        reader.add("its list of arguments", sorted(map(str, arguments)))
    if reader.unread:
        _logger.warning(
            "step %r: changes within %s are not noticed; set version=, and change it whenever they "
            "change",
            step.name,
            ", ".join(reader.unread),
        )
    return {
        "name": step.name,
        "input": list(step.input),
        "output": list(step.output),
        "version": None if step.version is None else str(step.version),
        "parts": {noun: reader.parts[noun] for noun in reader.parts if noun not in reader.rebound},
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first part that differs; None if the fingerprints agree."""
    before, now = (
        {
            "its list of input columns": repr(one["input"]),
            "its list of output columns": repr(one["output"]),
            "its version": repr(one["version"]),
            **one["parts"],
        }
        for one in (old, new)
    )
    for noun, text in now.items():
        was = before.get(noun, text)  # a module may be loaded in only one of two runs
        if was != text:
            is_shown = not (text.startswith("#") or was.startswith("#"))
            how = f"was {was} and is {text}" if is_shown else "differs"
            return f"step {new['name']!r}: {noun} {how}"
    return None


class _Reader:
    """One walk over all values and code of a step."""

    def __init__(self, fn: Any) -> None:
        self.home = str(getattr(getattr(fn, "func", fn), "__module__", None))
        """Module of the step's function."""
        self.parts: dict[str, str] = {}
        """Text or hash of each part, by the noun for messages; inner parts come first."""
        self.unread: list[str] = []
        """Nouns of the parts of which only the type counts."""
        self.rebound: set[str] = set()
        """Nouns of the globals that a function rebinds."""
        self._found: dict[Any, Any] = {}
        """Texts of objects by `id`, "itself" while an object is being described; also, as keys, the
        modules with the names that were looked up in them.
        """

    def add(self, noun: str, value: Any) -> str:
        """Record a part of the step, and return its text."""
        try:
            text = self._hash(value)
        except Exception:  # objects may have methods of any kind
            text = type(value).__qualname__
            self.unread.append(noun)
        self.parts[noun] = text
        return text

    def _hash(self, value: Any) -> str:
        content = hashlib.sha256()
        file: Any = SimpleNamespace(write=content.update)
        pickler = _Pickler(file, protocol=4)
        # without references, which depend on the identity of equal objects
        pickler.fast = True
        pickler.reader = self
        pickler.dump(value)
        return "#" + content.hexdigest()[:32]

    def identify(self, value: Any) -> str | None:
        """Return a text for a value that `pickle` has no stable form for, else None."""
        if type(value) in (str, int, float, bool, bytes, tuple, list, dict):
            return None
        key = id(value)
        if key not in self._found:
            self._found[key] = value, "itself"
            found = self._describe(value)
            self._found[key] = value, self._hash(found) if isinstance(found, list) else found
        text: str | None = self._found[key][1]
        return text

    def _describe(self, value: Any) -> Any:
        """Return a list of parts to hash, or a text; None leaves the value to `pickle`."""
        kind: Any = type(value)
        name = kind.__qualname__
        if isinstance(value, type):
            return self._describe_class(value)
        if isinstance(value, FunctionType):
            return self._describe_function(value)
        if isinstance(value, set | frozenset):
            return [name, *sorted(map(self._hash, value))]
        if isinstance(value, ModuleType | PurePath):
            return [name, getattr(value, "__name__", str(value))]
        if isinstance(meaning := getattr(value, "meaning", None), str):
            return meaning
        if (torch := sys.modules.get("torch")) and isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return [str(value.dtype), list(value.shape), content.numpy()]
        if not _is_own(kind.__module__):
            if callable(inner := getattr(value, "__wrapped__", None)):
                return self.identify(inner)
            if kind.__module__ in _SILENT:
                return name
            if kind.__module__.partition(".")[0] in _INSTALLED or not hasattr(value, "__dict__"):
                return None
            state = value.state_dict() if hasattr(value, "state_dict") else vars(value)
            if not _is_data(state):
                raise TypeError(f"a {name} has parts of other types than data")
            return [name, dict(state)]
        if isinstance(value, tuple | list | dict | str | int | float | bytes | enum.Enum):
            return None
        changes = _find_changes(kind) | {"__doc__", "__module__"}
        state = value.__getstate__() or {}
        if not isinstance(state, dict):  # of a class with slots
            return [kind, state]
        found = [
            [attribute, self.add(f"the attribute {attribute} of {name}", state[attribute])]
            for attribute in sorted(state.keys() - changes)
        ]
        return [kind, found]

    def _describe_function(self, func: FunctionType) -> list[Any]:
        code, scope = func.__code__, func.__globals__
        module = _module(func)
        values = {**inspect.getclosurevars(func).nonlocals}
        tree = None
        if self._counts(module):
            tree = find_tree(code)
            described: list[Any] = [describe_tree(tree) if tree else describe_bytecode(code)]
            parameters = inspect.signature(func, follow_wrapped=False).parameters.values()
            values |= {one.name: one.default for one in parameters if one.default is not one.empty}
            uses = scan(code)
            self.rebound.update(self._noun(module, name) for name in uses.rebinds)
            for name in uses.changes & values.keys():
                del values[name]
            for name in sorted(uses.globals & scope.keys()):
                self._add_global(module, name, scope[name], uses.names)
            for name in sorted(uses.imports):
                with contextlib.suppress(ImportError):
                    imported = importlib.util.resolve_name(name, scope.get("__package__"))
                    self._enter(imported, uses.names)
        else:
            described = [module.partition(".")[0], code.co_qualname]
        for name, value in sorted(values.items()):
            if tree or _is_fixed(value):
                noun = f"the variable {name} of {func.__qualname__}()"
                described.append([name, self.add(noun, value)])
        return described

    def _describe_class(self, cls: type) -> list[Any]:
        if not self._counts(cls.__module__):
            return [cls.__module__.partition(".")[0], cls.__qualname__]
        described: list[Any] = [cls.__qualname__]
        for base in cls.__bases__:
            described.append(self.add(f"its base class {base.__qualname__}", base))
        changes = _find_changes(cls)
        for name, member in sorted({**vars(cls), **getattr(cls, "__members__", {})}.items()):
            functions = _functions(member)
            is_own = any(self._counts(_module(func)) for func in functions)
            is_special = name[0] == name[-1] == "_"
            if is_own or not (is_special or (name in changes and not functions)):
                noun = f"the attribute {name} of {cls.__qualname__}"
                kind = type(member).__qualname__
                described.append([name, kind, functions or self.add(noun, member)])
        return described

    def _counts(self, module: str) -> bool:
        """Return whether code of `module` is part of the fingerprint."""
        return (module == self.home and module not in _INSTALLED) or _is_own(module)

    def _noun(self, module: str, name: str) -> str:
        return f"the global {name}" if module == self.home else f"the global {module}.{name}"

    def _add_global(self, module: str, name: str, value: Any, names: frozenset[str]) -> None:
        noun = self._noun(module, name)
        if isinstance(value, ModuleType):
            self._enter(value.__name__, names)
        elif callable(value):
            self.parts[noun] = "code"
            self.add(noun.replace("the global", "its helper") + "()", value)
        elif not _is_fixed(value):
            self.add(noun, type(value))
        else:
            self.add(noun, value)
            shown = repr(value) if isinstance(value, str | int | float | None) else ""
            if 0 < len(shown) <= _SHOWN and not _SECRET.search(name):
                self.parts[noun] = shown

    def _enter(self, module: str, names: frozenset[str]) -> None:
        """Describe the variables of a module that have these names."""
        key = module, names
        if key in self._found or not self._counts(module):
            return
        self._found[key] = None
        if module in sys.modules:
            variables = vars(sys.modules[module])
            for name in sorted(names & variables.keys()):
                self._add_global(module, name, variables[name], names)
        else:
            spec = importlib.util.find_spec(module)
            self.add(f"the module {module}", describe_file(getattr(spec, "origin", None) or ""))


class _Pickler(pickle.Pickler):
    """A pickler that asks a reader for functions, classes, sets and instances."""

    reader: _Reader

    def persistent_id(self, value: Any) -> str | None:
        """Return the text that stands for a value; None leaves the value to `pickle`."""
        return self.reader.identify(value)


def _is_data(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set):
        return all(map(_is_data, value))
    return isinstance(value, str | int | float | bytes | None) or hasattr(value, "dtype")


def _is_fixed(value: Any) -> bool:
    """Return whether a value is immutable: it has a hash that is not its address."""
    hashing: Any = type(value).__hash__
    is_named = isinstance(value, FunctionType | type | None)
    return is_named or hashing not in (None, object.__hash__)


def _module(func: FunctionType) -> str:
    return str(func.__globals__.get("__name__"))


def _functions(member: Any) -> list[FunctionType]:
    """Return the functions of an attribute of a class, with or without a decorator."""
    names = ("fget", "fset", "fdel", "func", "__wrapped__")
    found = [member, *(getattr(member, name, None) for name in names)]
    functions = [func for func in found if isinstance(func, FunctionType)]
    generated = "__create_fn__|__annotate"  # by dataclasses, and by Python for annotations
    return [func for func in functions if not re.search(generated, func.__code__.co_qualname)]


@functools.cache
def _find_changes(cls: type) -> set[str]:
    """Return the attributes that the methods of a class change."""
    return {
        name[1:]
        for base in cls.__mro__
        if _is_own(base.__module__)
        for method, member in vars(base).items()
        if method not in _BUILDERS
        for func in _functions(member)
        for name in {f".{method}"} | scan(func.__code__).changes  # its own: a cached property
        if name.startswith(".")
    }


@functools.cache
def _is_own(module: str) -> bool:
    """Return whether a module is of the user: not standard, and not of an installed package."""
    package = module.partition(".")[0]
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
    is_installed = package in _INSTALLED or re.search("(site|dist)-packages", repr(spec))
    return module == "__main__" or bool(spec and not is_installed)
