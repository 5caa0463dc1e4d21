"""Agreement of docs/design/ with the code: files, names, tests and letters of the flush rule."""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from pathlib import Path

import pytest

from batched._core import linger

ROOT = Path(__file__).parent.parent
CODE = ROOT / "batched"
DESIGN = ROOT / "docs/design"


def page(name: str) -> str:
    return (DESIGN / name).read_text()


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
