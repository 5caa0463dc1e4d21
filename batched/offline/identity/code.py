"""Fingerprints of steps, which tell a run whether its progress file belongs to other code.

A changed step must be noticed, and an unchanged step must never be refused. A fingerprint is the
same in every process, and after the function has run.

1. A function counts by its loaded code, without comments, formatting and docstrings. Code is
   followed by name through globals, closures, decorators, classes and modules, except installed
   packages: their functions and classes count by name.
2. Globals, defaults, closures and arguments count by value, also if they are mutable: scalars,
   containers, arrays up to 16 MB, registries of functions, and instances by their attributes.
3. What the code changes is a cache, and counts by type: a variable, item or attribute that a
   function changes which the step's call can reach. Changes at import do not make a cache.
4. Instances of installed classes count by a text `meaning`, else by their attributes if these are
   data. A warning names each other one, as a model, tokenizer or client.
5. `version=` stands for code and arguments. The name of a step does not count.
6. All values are kept as salted hashes. Keys and passwords do not count.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from inspect import isfunction, ismodule
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from ..._collate.arguments import signature_of
from .syntax import walk

_logger = logging.getLogger("batched")

_LARGEST = 16 << 20
"""Bytes of the largest array that counts by value."""
_INSTALLED = {*sys.stdlib_module_names, __name__.partition(".")[0]}
_SECRET = re.compile(r"\w+ \w+ '?\w*(api_?key|password|secret)\w*'?( of .*)?", re.IGNORECASE)
_SILENT = re.compile("(_abc|_?thread(ing)?|queue|_?asyncio|concurrent|logging|_?weakref|os)\\b")
"""Modules of types that change nothing in a result."""
_BUILDERS = ("__init__", "__post_init__", "__new__", "__setstate__")
"""Methods that make an instance; other methods change it."""
_INNER = ("fget", "fset", "func", "__func__", "__wrapped__")
"""Attributes by which a decorated method has its function."""
_VARIABLES = ("_GLOBAL", "_NAME")
"""Ends of operations that look up a variable of the module."""
_NAMES = (*_VARIABLES, "_ATTR", "_METHOD", "_FROM")
"""Ends of operations that look up a name which is no local variable."""


def fingerprint(step: Any, salt: str = "") -> dict[str, Any]:
    """Return the meaning of a step as JSON values. `salt`: a text of the progress file.

    A warning of the logger `batched` names the parts in which a change is not noticed.
    """
    reader = _Reader(step, _Reader(step, set()).changed())
    if reader.unread:
        _logger.warning(
            "step %r: changes within %s are not noticed; set version=, and change it whenever they "
            "change",
            step.name,
            ", ".join(sorted(reader.unread)),
        )
    return {
        "name": step.name,
        "input": list(step.input),
        "output": list(step.output),
        "version": None if step.version is None else str(step.version),
        "python": sys.version.split()[0],
        "parts": {noun: _hash([salt, text]) for noun, text in reader.parts.items()},
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return a sentence on the first part that differs; None if the fingerprints agree."""
    why = ""
    for name in ("input", "output", "version"):
        if old[name] != new[name]:
            return f"step {new['name']!r}: its {name} was {old[name]!r} and is {new[name]!r}"
    if old["python"] != new["python"]:
        why = f" (Python was {old['python']} and is {new['python']}, which may be the reason)"
    for noun, text in new["parts"].items():
        if old["parts"].get(noun, text) != text:
            return f"step {new['name']!r}: {noun} differs{why}"
    return None


class _Reader:
    """One walk over all values and code of a step."""

    def __init__(self, step: Any, caches: set[Any]) -> None:
        """Describe a step. `caches`: what its code changes, as an earlier walk found it."""
        # the module of the step's function
        self._home = getattr(getattr(step.fn, "func", step.fn), "__module__", None)
        self._caches = caches
        self.parts: dict[str, str] = {}
        """Text of each part, by the noun for messages; inner parts come first."""
        self.unread: set[str] = set()
        """Nouns of the parts of which only the type counts."""
        self._names: set[str] = set()  # of globals and attributes in the code
        self._changes: list[tuple[str, Any]] = []  # name of a method, and place of its change
        self._found: dict[Any, Any] = {}  # texts by `id`, with the object so that it lives
        if step.version is None:
            self.add("its code", step.fn)
            for name in ("preprocess", "postprocess", "where", "route"):
                self.add(f"its {name}", getattr(step, name, None))
            arguments = {**dict(enumerate(step.args)), **step.kwargs}
            for place, value in arguments.items():
                self.add(f"its argument {place!r}", value)
            self.add("its list of arguments", sorted(map(str, arguments)))

    def changed(self) -> set[Any]:
        """Return the places that the code changes: an object's `id`, or with a variable's name."""
        return {
            place
            for method, place in self._changes
            if not method or method in self._names or method.startswith("__")
        }

    def add(self, noun: str, value: Any, *places: Any) -> None:
        """Record a part of the step, which is in these places."""
        module = type(value).__module__
        text = module
        if {id(value), *places} & self._caches or _SECRET.match(noun) or _SILENT.match(module):
            return
        try:
            text = self._describe(value)
        except Exception:  # objects may have methods of any kind
            self.unread.add(noun)
        self.parts[noun] = self.parts.get(noun, "") + text

    def _describe(self, value: Any) -> str:
        """Return a text for a value; raise an error for a value that counts by type alone."""
        if isinstance(value, str | int | float | bytes | complex | None):
            return f"{type(value).__qualname__} {value!a}"
        inner = getattr(value, "__wrapped__", None)
        if callable(inner) and not (
            isinstance(value, FunctionType | MethodType)
            or self._counts(type(value).__module__)
            or _meaning(value)
        ):
            return self._describe(inner)
        if id(value) not in self._found:
            self._found[id(value)] = value, "itself"
            self._found[id(value)] = value, _hash(self._parts_of(value))
        text: str = self._found[id(value)][1]
        return text

    def _parts_of(self, value: Any) -> Iterator[str]:
        kind: Any = type(value)
        yield kind.__qualname__
        is_own = self._counts(kind.__module__)
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", None)
        if isinstance(value, dict | MappingProxyType):
            value = [*value, *value.values()]
        if isinstance(value, type):
            yield from self._class(value)
        elif isfunction(value):
            yield from self._function(value)
        elif ismodule(value):
            yield value.__name__
        elif name and owner is not None and not ismodule(owner):
            self._names.add(name)
            yield from (name, self._describe(owner))
        elif isinstance(value, list | tuple | deque):
            yield from map(self._describe, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self._describe, value))
        elif meaning := _meaning(value):
            with contextlib.suppress(ValueError, AttributeError):  # not of a client or generator
                for each, part in json.loads(meaning).items():
                    self.add(f"its {each!r}", part)
            yield meaning
        elif is_own:
            yield self._describe(kind)
            for name, part in sorted(_state(value).items()):
                places = [(id(each), name) for each in (value, *kind.__mro__)]
                self.add(f"the attribute {name} of {kind.__qualname__}", part, *places)
        elif callable(value) and name:
            yield name
        else:
            yield self._describe(_data(value))

    def _function(self, func: FunctionType, owner: Any = None) -> Iterator[str]:
        """Describe a function; `owner` is the class that has it as a method."""
        found = dict(inspect.getclosurevars(func).nonlocals)
        if not self._counts(func.__module__):
            yield func.__qualname__
            yield from [self._describe(one) for one in found.values() if isfunction(one)]
            return
        code, scope, method = func.__code__, func.__globals__, ""
        uses = [*walk(code)]
        yield ascii(uses)
        found |= _defaults(func)
        for each, value in found.items():
            self.add(f"the variable {each} of {func.__qualname__}()", value, (id(func), each))
        names = {each for how, each in uses if how.endswith(_NAMES)}
        imported = {each for how, each in uses if how.endswith("_FROM")}
        self._names |= names
        variables = {each for how, each in uses if how.endswith(_VARIABLES)}
        self._scope(scope, variables - found.keys(), names)
        if owner is not None:
            found.update(dict.fromkeys(code.co_varnames[:1], owner))
            method = func.__name__
        for how, each in uses:
            places: list[Any] = []
            if how == "IMPORT_NAME" and (each[0] == "." or self._counts(each)):
                try:
                    module = importlib.import_module(each, scope.get("__package__"))
                    for name in imported - vars(module).keys():  # perhaps modules of a package
                        with contextlib.suppress(ImportError):
                            importlib.import_module(f"{module.__name__}.{name}")
                    self._scope(vars(module), names, names)
                except Exception:
                    self.unread.add(f"the module {each}")
            elif how.endswith(("E_GLOBAL", "E_DEREF")):  # STORE or DELETE
                places = [(id(scope if how.endswith("GLOBAL") else func), each)]
            elif how == "change" and (each[0] in found or each[0] in names):
                target = found.get(each[0], scope.get(each[0]))
                places = [(id(vars(target) if ismodule(target) else target), each[1])]
                constant = isinstance(target, str | int | tuple | None)
                if not (constant or self._counts(getattr(target, "__module__", "builtins"))):
                    places.append(id(target))
            if method not in _BUILDERS:
                self._changes += [(method, place) for place in places]

    def _scope(self, scope: Mapping[str, Any], variables: Set[str], names: Set[str]) -> None:
        """Describe these variables of a module; of modules among them, those with `names`."""
        for name in sorted(variables & scope.keys()):
            value = scope[name]
            if not ismodule(value):
                self.add(f"the global {name}", value, (id(scope), name))
            elif self._counts(value.__name__) and (value, *names) not in self._found:
                self._found[value, *names] = None
                self._scope(vars(value), names, names)

    def _class(self, cls: Any) -> Iterator[str]:
        yield cls.__qualname__
        if not self._counts(cls.__module__):
            return
        for name, value in _defaults(cls).items():
            self.add(f"the variable {name} of {cls.__qualname__}()", value)
        with contextlib.suppress(Exception):  # a model of pydantic; sets have no order
            yield from sorted(json.dumps(cls.model_json_schema()).split('"'))
        for base in cls.__bases__:
            self.add(f"its base class {base.__qualname__}", base)
        for name, member in sorted(vars(cls).items()):
            parts = [member, *(getattr(member, each, None) for each in _INNER)]
            functions = [func for func in parts if isfunction(func)]
            for func in functions:
                yield from (name, type(member).__qualname__, *self._function(func, cls))
            if not (functions or name[0] == name[-1] == "_" or (id(cls), name) in self._caches):
                yield name
                self.add(f"the attribute {name} of {cls.__qualname__}", member)

    def _counts(self, module: Any) -> bool:
        """Return whether code of `module` is part of the fingerprint."""
        return (module == self._home and module not in _INSTALLED) or _is_own(str(module))


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()[:32]


def _meaning(value: Any) -> str | None:
    """Return the text by which an instance counts, if it has one."""
    meaning = getattr(value, "meaning", None)
    return meaning if isinstance(meaning, str) and not isinstance(value, type) else None


def _state(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance, also in slots."""
    state: Any = object.__getstate__(value)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(attributes or {}), **(slots or {})}


def _defaults(func: Any) -> dict[str, Any]:
    """Return the parameters of a function or class that have defaults."""
    found = signature_of(func, follow_wrapped=False).parameters.values()
    return {one.name: one.default for one in found if one.default is not one.empty}


def _data(value: Any) -> Any:
    """Return data that stand for an instance of an installed class; raise an error if none do."""
    kind: Any = type(value)
    state = _state(value)
    if "root_render_func" in state:  # of a template of Jinja
        blocks = {**value.blocks, "": value.root_render_func}
        return {name: ascii([*walk(func.__code__)]) for name, func in blocks.items()}
    if hasattr(value, "dtype") and value.nbytes <= _LARGEST:
        return (value.numpy(force=True) if hasattr(value, "detach") else value).dumps()
    if isinstance(value, re.Pattern):
        return value.pattern, value.flags
    is_standard = kind.__module__.partition(".")[0] in _INSTALLED
    if is_standard and not getattr(value, "__dict__", None) and not hasattr(value, "__next__"):
        return value.__reduce_ex__(2)[:3]
    if state and not hasattr(value, "state_dict"):
        return state
    # a constant, as a device
    if kind.__name__ == "dtype" or kind.__hash__ not in (None, object.__hash__):
        return ascii(value)
    raise TypeError("a change would not be noticed")


@functools.cache
def _is_own(module: str) -> bool:
    """Return whether a module is of the user: not standard, and not of an installed package."""
    package = module.partition(".")[0]
    if package == "__main__":
        return True
    spec = None  # of a module that was made by hand
    with contextlib.suppress(ValueError):
        spec = importlib.util.find_spec(package)
    return package not in _INSTALLED and not re.search("(site|dist)-packages", repr(spec))
