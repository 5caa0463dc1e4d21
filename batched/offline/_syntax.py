"""Source code of functions and classes as syntax trees, found without importing or running any.

`inspect.getsource` gives lines, of which a lambda is a part at best, and a class the first of its
name. `ast.unparse` and `ast.dump` write the same tree differently from one Python to the next.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from typing import Any

__all__ = ["class_trees", "describe_tree", "function_tree"]


@functools.lru_cache(maxsize=16)
def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _module_tree(filename: str) -> ast.Module:
    linecache.checkcache(filename)  # it may have been edited, and loaded anew
    return _parse("".join(linecache.getlines(filename)))


def function_tree(code: types.CodeType) -> ast.AST | None:
    """The syntax tree of a function: that of its name and line; of several lambdas on its line, the
    innermost with a body that all its instructions come from.
    """
    found: list[ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef] = []
    for node in ast.walk(_module_tree(code.co_filename)):
        if isinstance(node, ast.Lambda):
            if code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
                found.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            if code.co_name == node.name and first == code.co_firstlineno:
                found.append(node)
    if len(found) < 2:
        return found[0] if found else None
    positions = [
        (line, column)
        for line, _, column, end in code.co_positions()
        if line is not None and column is not None and column != end
    ]
    around = [
        node
        for node in found
        if isinstance(node, ast.Lambda) and all(_contains(node.body, at) for at in positions)
    ]
    return max(around, key=lambda node: (node.lineno, node.col_offset)) if around else None


def _contains(node: ast.expr, position: tuple[int, int]) -> bool:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= position < end


def class_trees(qualname: str, filename: str) -> list[ast.AST]:
    """Every class of that name in the file: which of them it is, not every Python tells."""
    found: list[ast.AST] = []

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                if path + child.name == qualname:
                    found.append(child)
                visit(child, f"{path}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{path}{child.name}.<locals>.")
            else:
                visit(child, path)

    visit(_module_tree(filename), "")
    return found


def describe_tree(node: Any, root: bool = True) -> Any:
    """A syntax tree as JSON, without docstrings and the decorators of a function at its root, and
    without what one Python has and another does not.
    """
    if isinstance(node, list):
        return [describe_tree(part, False) for part in node]
    if isinstance(node, ast.Constant):
        return ["Constant", ascii(node.value)]
    if not isinstance(node, ast.AST):
        return node
    skipped = {"ctx", "type_comment", "kind"}
    if root and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        skipped.add("decorator_list")
    fields = {
        name: value
        for name, value in ast.iter_fields(node)
        if value is not None and value != [] and name not in skipped
    }
    has_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if has_body and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    if isinstance(node, ast.JoinedStr):  # to which Python 3.12.1 adds an empty part
        fields["values"] = [
            part
            for part in node.values
            if not (isinstance(part, ast.Constant) and part.value == "")
        ]
    parts = {name: describe_tree(value, False) for name, value in fields.items()}
    return [type(node).__name__, parts]
