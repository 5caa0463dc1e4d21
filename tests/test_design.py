"""Agreement of docs/design/ with the code: words, files, tests and letters of the flush rule."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from batched._core import linger

ROOT = Path(__file__).parent.parent
CODE = ROOT / "batched"
DESIGN = ROOT / "docs/design"
PACKAGES = ("_core", "_collate", "_execution", "_runtime", "_generation", "_chat", "offline")

Word = tuple[str, str]
"""Path of a file, relative to `batched/`, and a name in the file."""


def page(name: str) -> str:
    return (DESIGN / name).read_text()


def table(package: str) -> set[Word]:
    """Return each name in the table of a package in words.md, with each file of its row."""
    section = page("words.md").split(f"\n## `{package}`\n")[1].split("\n## ")[0]
    return {
        (f"{package}/{file}", name)
        for row in re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
        for file in re.findall(r"`(.+?)`", row.split("|")[2])
        for name in re.findall(r"`(.+?)`", row.split("|")[1])
    }


def modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((CODE / package).rglob("*.py")):
        yield str(path.relative_to(CODE)), ast.parse(path.read_text())


def bound(body: list[ast.stmt]) -> set[str]:
    """Return the names that functions, classes and assignments bind at module level."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If):
            names |= bound(node.body)
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_has_its_word(package: str) -> None:
    classes = {
        (path, node.name)
        for path, tree in modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert classes
    assert not classes - table(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_word_is_in_use(package: str) -> None:
    names = {(path, name) for path, tree in modules(package) for name in bound(tree.body)}
    assert not table(package) - names


def test_the_layout_names_every_file_and_no_other() -> None:
    layout = page("architecture.md").split("\n## Layout\n\n```text\n")[1].split("\n```\n")[0]
    assert sorted(line.split()[0] for line in layout.splitlines()) == sorted(
        str(path.relative_to(CODE))
        for path in CODE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


@pytest.mark.once
def test_every_guarantee_has_its_tests() -> None:
    text = page("guarantees.md")
    promises = re.findall(r"^- .*?(?=^- |^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert promises
    for promise in promises:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", promise)
        assert tests, promise
        for path, test in tests:
            assert test in bound(ast.parse((ROOT / path).read_text()).body), f"{path}::{test}"


@functools.cache
def code_words() -> set[str]:
    """Return the words of all code, comments included, and the names of modules."""
    paths = [
        path for name in ("batched", "benchmarks", "tests") for path in (ROOT / name).rglob("*.py")
    ]
    texts = [f"{path.name} {path.read_text()}" for path in paths if path != Path(__file__)]
    return set(re.findall(r"\w+", " ".join(texts)))


@pytest.mark.parametrize("name", sorted(path.name for path in DESIGN.glob("*.md")))
def test_names_on_the_pages_exist_in_the_code(name: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", page(name), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([A-Za-z_][\w.]*)`", prose):
        assert set(code.split(".")) <= code_words(), code
    for path in re.findall(r"`((?:tests|benchmarks)/[\w/.]+)", prose):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`(_\w+/\w+\.py)`", prose):
        assert (CODE / path).exists(), path


def test_the_letters_of_the_flush_rule_match_the_code() -> None:
    section = page("flush-rule.md").split("\n## Hindsight\n")[1]
    shown = section.split("```text\n")[1].split("```")[0]
    said = textwrap.dedent(linger.__doc__ or "")
    assert {line for line in shown.splitlines() if line} <= set(map(str.strip, said.splitlines()))
    letter = re.compile(r"^ *(\w) {3}\w", re.MULTILINE)
    assert letter.findall(shown) == letter.findall(said) != []
