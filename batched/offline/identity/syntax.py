"""Loaded code as operations, and the names that it changes. No code of the user runs here.

1. Operations are of bytecode, and not of the file, which may have been edited since the import.
   They have neither positions nor docstrings. Another minor version of Python has other operations.
2. A variable is changed in place where an item or attribute is stored or deleted, or where a method
   is looked up that changes a container. The expression that is stored to, and its first variable,
   begin at the same position.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from itertools import zip_longest
from types import CodeType
from typing import Any

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_STORES = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_ATTR", "DELETE_ATTR")
_PLACES = ("__doc__", "__firstlineno__", "__module__", "__static_attributes__")
"""Variables of a class within a function that tell of its text alone."""
_MUTATORS = re.compile(
    "add|(append|extend|pop)(left)?|clear|discard|insert|popitem|put|remove|reverse|setdefault|sort|"
    "update|write"
)


def walk(code: CodeType) -> Iterator[tuple[str, Any]]:
    """Yield operations with their arguments, of code and of the functions within it.

    The module of an import has its leading dots. "change" comes with a variable that is changed in
    place, and the attribute where it is changed, or None.
    """
    yield "arguments", (code.co_flags, code.co_varnames[: code.co_argcount])
    chains: dict[Any, list[Any]] = {}  # variable and attributes, by their position
    pair: list[str] = []  # variables that one operation has loaded
    before: list[Any] = []
    found = [*dis.get_instructions(code)]
    for one, after in zip_longest(found, found[1:]):
        stores = [each.argval for each in (one, after) if each and each.opname == "STORE_NAME"]
        if any(name in _PLACES for name in stores):
            continue
        how = one.opname
        value: Any = one.argval
        chain = chains.setdefault(one.positions and one.positions[::2], pair[-1:])
        if isinstance(value, CodeType):
            yield from walk(value)
            value = None
        elif isinstance(value, frozenset):
            value = sorted(map(ascii, value))
        elif how == "IMPORT_NAME":  # comes after its level and the imported names
            value = "." * before[-2] + value
        elif how in _ATTRIBUTES:
            chain.append(value)
        elif "LOAD_FAST" in how and isinstance(value, tuple):
            chain[:], pair = value[:1], [*value]
        elif how.startswith("LOAD"):
            chain[:] = [value]
        if how in _STORES or (how in _ATTRIBUTES and _MUTATORS.fullmatch(str(value))):
            yield "change", [*chain, value, None][:2]
        before.append(value)
        yield how, value
