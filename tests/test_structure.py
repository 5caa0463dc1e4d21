"""The plan of the house, read off the modules themselves."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tokenize
from collections import Counter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import batched
from stage import python

ROOT = Path(batched.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# Each module imports from its own row and from rows above it.
LAYERS = [
    ["batched._installation", "batched.errors", "batched._core"],
    ["batched.stats"],
    ["batched._collate"],
    ["batched._execution"],
    ["batched._runtime"],
    ["batched._steps"],
    ["batched._operations"],
    ["batched._function"],
    ["batched._services"],
    ["batched._connect"],
    [
        "batched.inference",
        "batched.aio",
        "batched.metrics",
        "batched.tracing",
        "batched.testing",
        "batched.asgi",
    ],
    ["batched._generation", "batched._chat"],
    ["batched.generation", "batched.chat", "batched.embeddings"],
    ["batched"],
    ["batched.offline"],
    ["batched.beam"],
    ["batched._commands"],
    ["batched.cli"],
    ["batched.__main__"],
]

EXTRAS = {
    *("apache_beam", "numpy", "openai", "opentelemetry", "prometheus_client", "pydantic"),
    *("rich", "torch", "transformers"),
}
"""Packages that some modules need and the library does not."""


NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def layer(module: str) -> int:
    names = [(number, name) for number, row in enumerate(LAYERS) for name in row]
    inside = [
        (len(name), number)
        for number, name in names
        if module == name or (module.startswith(f"{name}.") and name != "batched")
    ]
    assert inside, f"{module} has no place in LAYERS"
    return max(inside)[1]


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@functools.cache
def imports(module: str) -> set[str]:
    """Return every module that `module` imports, also for type checkers, with absolute names."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            found.update(
                full if (full := f"{origin}.{alias.name}") in MODULES else origin
                for alias in node.names
            )
    return found


@pytest.mark.once
def test_imports_point_one_way() -> None:
    for module in MODULES:
        for imported in imports(module):
            if imported.split(".")[0] == "batched":
                assert layer(imported) <= layer(module), f"{module} imports {imported}"


PURE = {
    *("__future__", "bisect", "collections", "copy", "dataclasses", "difflib", "heapq"),
    *("itertools", "math", "numbers", "operator", "types", "typing"),
}


@pytest.mark.once
def test_the_core_is_pure() -> None:
    for module in MODULES:
        if module.startswith(("batched._core", "batched._chat.limits")):
            outside = {name.split(".")[0] for name in imports(module)} - {"batched"}
            assert outside <= PURE, module


@pytest.mark.once
def test_all_times_are_of_one_clock_which_is_fine_everywhere() -> None:
    # before Python 3.13 `time.monotonic` has steps of 15.6 ms on Windows
    clock = re.compile(r"\b(time|loop)\.(monotonic|time)(_ns)?\b")
    for module, path in MODULES.items():
        assert not clock.search(path.read_text()), module


def weight(module: str) -> int:
    """Return the tokens of a module, without comments and docstrings. An f-string counts as one, as
    before Python 3.12.
    """
    count = nested = 0
    with MODULES[module].open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            name = tokenize.tok_name[token.type]
            count += not nested and token.type not in NO_CODE
            nested += (name == "FSTRING_START") - (name == "FSTRING_END")
    docstrings = [
        node
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]
    return count - len(docstrings)


def budgets() -> dict[str, int]:
    """Return the most tokens of each room, by the first cell of its row in the page."""
    page = (ROOT.parent / "docs/design/architecture.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \|", page.split("\n## Weight\n")[1], re.MULTILINE)
    return {room: int(tokens.replace(",", "")) for room, tokens in rows}


@pytest.mark.once
def test_no_room_is_heavier_than_its_budget() -> None:
    found: Counter[str] = Counter()
    rooms = {name: room for room in budgets() for name in re.findall(r"`(\w+)`", room)}
    for module in MODULES:
        name = module.removeprefix("batched.").split(".")[0]
        found[rooms.get(name, "all other modules")] += weight(module)
    assert found.keys() == budgets().keys()
    too_heavy = {room: count for room, count in found.items() if count > budgets()[room]}
    assert not too_heavy, "the table under Weight in docs/design/architecture.md has the budgets"


def test_every_module_is_importable_and_public_modules_say_what_is_public() -> None:
    for module in MODULES:
        if module == "batched.__main__":
            continue
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in EXTRAS:
                raise
            continue
        # `batched.offline` says what is public of it
        if module.startswith("batched.offline.") or "._" in module or module == "batched.cli":
            continue
        assert loaded.__doc__
        assert len(loaded.__all__) == len(set(loaded.__all__))
        assert all(getattr(loaded, name) is not None for name in loaded.__all__)
        here = {
            name
            for name, value in vars(loaded).items()
            if getattr(value, "__module__", None) == module and not name.startswith("_")
        }
        assert here <= set(loaded.__all__)


def test_importing_it_loads_none_of_what_it_works_with() -> None:
    ran = python(
        "import sys, batched.aio.inference, batched.chat, batched.cli, batched.embeddings\n"
        "print(*sys.modules)"
    )
    loaded = {name.partition(".")[0] for name in ran.stdout.split()}
    assert "batched" in loaded
    assert not loaded & {
        *("numpy", "torch", "trio", "uvloop", "transformers", "anyio", "rich", "matplotlib"),
        *("typing_extensions", "openai", "pydantic", "pytest", "httpx", "pyarrow"),
    }
