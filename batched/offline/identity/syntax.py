"""Source code of loaded functions as syntax trees, and the names that a function uses and changes.

1. The syntax tree of a function is the tree in its file that compiles to the loaded code, on any
   line. A file that was edited after its import may have none.
2. The description of a tree is the same with every Python, unlike bytecode, `ast.unparse` and
   `ast.dump`: a newer Python computes no row again.
3. No code of the user runs here.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import warnings
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

__all__ = ["Uses", "describe_bytecode", "describe_file", "describe_tree", "find_tree", "scan"]

_NUMBERED = 1 << 24
"""Functions of a file have line numbers from here on: several may begin on one line."""

_MUTATORS = (
    "add append appendleft clear discard extend insert pop popitem popleft put remove reverse "
    "setdefault sort update write"
)


def _read(filename: str) -> tuple[ast.Module, dict[int, ast.AST], list[CodeType]]:
    linecache.checkcache(filename)
    return _compile("".join(linecache.getlines(filename)))


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[ast.Module, dict[int, ast.AST], list[CodeType]]:
    """Return the tree of a file, its functions by their numbers, and its code, nested code too."""
    nodes: dict[int, ast.AST] = {}
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
            for number, node in enumerate(ast.walk(tree), _NUMBERED):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    first: Any = [*getattr(node, "decorator_list", ()), node][0]
                    first.lineno, first.end_lineno = number, number + 1
                    nodes[number] = node
            return tree, nodes, [*_walk(compile(tree, "<file>", "exec", dont_inherit=True))]
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], []), {}, []


def _walk(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _walk(constant)


@functools.lru_cache(maxsize=4096)
def find_tree(code: CodeType) -> ast.AST | None:
    """Return the syntax tree of a function that compiles to this code; None if there is none."""
    loaded = describe_bytecode(code)
    _, nodes, codes = _read(code.co_filename)
    for compiled in codes:
        if compiled.co_qualname == code.co_qualname and describe_bytecode(compiled) == loaded:
            return nodes.get(compiled.co_firstlineno)
    return None


def describe_file(filename: str) -> Any:
    """Describe the syntax tree of a file as JSON."""
    return describe_tree(_read(filename)[0])


def describe_bytecode(code: CodeType) -> Any:
    """Describe loaded code as JSON, without positions; another Python gives another description."""
    constants = [
        describe_bytecode(value)
        if isinstance(value, CodeType)
        else ascii(sorted(map(ascii, value)) if isinstance(value, frozenset) else value)
        for value in code.co_consts
    ]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]


def describe_tree(node: Any, root: bool = True) -> Any:
    """Describe a tree as JSON, without the decorators of a function at its root.

    Docstrings, and other statements that are constants, are left out.
    """
    if isinstance(node, list):
        return [
            describe_tree(part, False)
            for part in node
            if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        ]
    if isinstance(node, ast.Constant | ast.MatchSingleton):
        return ascii(node.value)
    if not isinstance(node, ast.AST):
        return node
    skipped = ["ctx", "type_comment", "kind", *["decorator_list"] * root]
    fields = {name: value for name, value in ast.iter_fields(node) if name not in skipped}
    if isinstance(node, ast.JoinedStr):  # to which Python 3.12.1 adds an empty part
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    parts = [[name, describe_tree(value, False)] for name, value in fields.items() if value]
    return [type(node).__name__, parts]


class Uses(NamedTuple):
    """Names in the code of a function and of the functions within it."""

    globals: set[str]
    """Names that are looked up in the module or among the builtins."""
    imports: set[str]
    """Modules that the function imports, with leading dots where the import is relative."""
    names: frozenset[str]
    """Names of globals, attributes and modules."""
    rebinds: set[str]
    """Globals that the function rebinds."""
    changes: set[str]
    """Variables of a closure and attributes (`.name`) that are rebound or changed in place."""


def scan(code: CodeType) -> Uses:
    """Return the names that the function with this code uses and changes."""
    parts = [*_walk(code)]
    names = frozenset(name for part in parts for name in part.co_names)
    uses = Uses(set(), set(), names, set(), set())
    for part in parts:
        instructions = [*dis.get_instructions(part)]
        for place, one in enumerate(instructions):
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                uses.globals.add(one.argval)
            elif one.opname == "IMPORT_NAME":  # comes after its level and the imported names
                uses.imports.add("." * instructions[place - 2].argval + one.argval)
            elif one.opname.endswith("E_GLOBAL"):  # STORE or DELETE
                uses.rebinds.add(one.argval)
            elif one.opname.endswith("E_DEREF"):
                uses.changes.add(one.argval)
    for node in ast.walk(find_tree(code) or ast.Module([], [])):
        target: Any = node
        if isinstance(node, ast.Attribute | ast.Subscript) and (
            not isinstance(node.ctx, ast.Load) or getattr(node, "attr", "") in _MUTATORS.split()
        ):
            while isinstance(target, ast.Attribute | ast.Subscript):
                uses.changes.add("." + getattr(target, "attr", ""))
                target = target.value
            uses.changes.add(getattr(target, "id", ""))
    return uses
